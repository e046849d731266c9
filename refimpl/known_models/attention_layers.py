"""Which modules of a block are its attention: known by the functions that their forward names, not by their own names.

A class says what it calls in the names of its compiled code. Its methods are followed, and functions of its own file.
How a model is given another attention: by the registry of transformers.
"""

import inspect
import itertools

NAMES = (f"refimpl_attention_{number}" for number in itertools.count())
ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS"}
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}  # beside a softmax: an attention that is written out


def attentions_of(block):
    """List the modules inside `block` whose forward computes attention; of those inside one another the outer one."""
    found = []
    for module in block.modules():
        # the outer one has the projections, too
        inside = any(module is each for outer in found for each in outer.modules())
        if module is not block and not inside and computes_attention(type(module)):
            found.append(module)
    return found


def computes_attention(kind):
    """Tell whether the forward of a class of modules names PyTorch's attention, transformers' table of them, or a
    softmax beside a product of activations."""
    names = _names(kind.forward, kind, set())
    return bool(names & ATTENTION) or "softmax" in names and bool(names & PRODUCTS)


def _names(function, kind, seen):
    """Collect the names in a function's code, and of the methods and the functions of its own file that it names."""
    function = inspect.unwrap(function)  # transformers decorates forwards
    code = getattr(function, "__code__", None)
    if code is None or code in seen:
        return set()
    seen.add(code)
    names = set(code.co_names)
    for name in code.co_names:
        called = getattr(kind, name, function.__globals__.get(name))
        if inspect.isfunction(called) and called.__module__ == function.__module__:
            names |= _names(called, kind, seen)
    return names


def use_attention(model, function):
    """Register an attention of transformers' form under a name of its own, and tell `model` to use it. Returns the name
    and the one before, for `set_attn_implementation`."""
    from transformers import AttentionInterface

    name, before = next(NAMES), model.config._attn_implementation
    AttentionInterface.register(name, function)
    model.set_attn_implementation(name)
    return name, before


def is_cache(value):
    """Return True for a cache of transformers."""
    return any(each.__module__ == "transformers.cache_utils" for each in type(value).__mro__) or None
