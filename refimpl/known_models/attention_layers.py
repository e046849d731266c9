"""Which modules of a block are its attention: known by the functions that their forward names, not by their own names.

A class says what it calls in the names of its compiled code. Its methods are followed, and functions of its own file.
How a model is given another attention: by the registry of transformers.
"""

import copy
import inspect
import itertools

NAMES = (f"refimpl_attention_{number}" for number in itertools.count())
ATTENTION = {"scaled_dot_product_attention", "multi_head_attention_forward", "ALL_ATTENTION_FUNCTIONS"}
KNOWN = ("position_ids", "cache_position", "use_cache", "output_attentions", "num_items_in_batch", "is_causal",
         "position_embeddings", "return_dict", "labels", "shift_labels")  # that say nothing of attention
MASKED = ("an attention_mask beside a mask of blocks: expected none; pad at the end of rows, with targets −100 (causal "
          "attention of other tokens does not see paddings)")
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


def takes_from_registry(kind):
    """Tell whether the forward of a class of modules names transformers' table of attentions."""
    return "ALL_ATTENTION_FUNCTIONS" in _names(kind.forward, kind, set())


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


def use_attention(model, function, mask=None):
    """Register an attention of transformers' form under a name of its own, and tell `model` to use it. Returns the name
    and the one before, for `set_attn_implementation`. `mask`: makes its masks; without one it is given none."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name, before = next(NAMES), model.config._attn_implementation
    AttentionInterface.register(name, function)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(name)
    return name, before


def attend_by(model, attention, masked):
    """Let a model of transformers attend by `attention(q, k, v, *, causal, scale, dropout_p, window, softcap, sinks)`.
    `masked`: what is said where it gives its attention a mask, too. ValueError for a model that takes no other one."""
    take_attention(model, _as_in_registry(attention, masked))


def take_attention(model, function, mask=None):
    """Let a model of transformers, and no other that has its config, use an attention from now on; arguments as in
    `use_attention`. ValueError for a model that takes no other one."""
    copies = {}  # {id: copy}: what is one config in the model stays one
    for module in model.modules():
        if "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)
    name, before = use_attention(model, function, mask)
    if model.config._attn_implementation != name:
        model.set_attn_implementation(before)  # parts of it may have taken the new one
        raise ValueError(f"{type(model).__name__} takes no other attention (AttentionInterface), so it cannot be given "
                         "one from outside")


def causal_of(module, others, read):
    """Tell whether a layer of transformers asks for causal attention. `others`: what it gives besides what is `read`;
    ValueError for what is not known."""
    unknown = [name for name, given in others.items() if not (given is None or given is False or name in KNOWN)]
    if unknown:
        raise ValueError(f"{type(module).__name__} gives its attention {unknown[0]}: what that does here is not known; "
                         f"expected {read} and is_causal alone")
    causal = others.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def _as_in_registry(attention, masked):
    def attend(module, query, key, value, attention_mask=None, *, dropout=0.0, scaling=None, sliding_window=None,
               softcap=None, s_aux=None, **others):
        """Return (out (B, T, H, D), None), as the registry's functions do."""
        if attention_mask is not None:
            raise ValueError(masked)
        causal = causal_of(module, others, "scaling, sliding_window, softcap, s_aux")
        window = None if sliding_window is None else sliding_window - 1  # theirs counts the token itself
        out = attention(query, key, value, causal=causal, scale=scaling, dropout_p=dropout, window=window,
                        softcap=softcap, sinks=s_aux)
        return out.transpose(1, 2).contiguous(), None

    return attend


def attention_of(model):
    """Return give(model, attention), for a model of transformers: it attends by `attention` of `attend_by` to all
    tokens of a call. None for another model."""
    if getattr(getattr(model, "config", None), "_attn_implementation", None) is None:
        return None
    return _give


def _give(model, attention):
    attend_by(model, attention, MASKED)
    for each in {model, model.base_model}:  # the latter is also called by itself
        each.register_forward_pre_hook(_whole, with_kwargs=True)
    return model


def check_named(args):
    """Raise ValueError for more than the tokens by position: an attention_mask there would be left out in silence."""
    if len(args) > 1:
        raise ValueError(f"{len(args)} arguments by position: expected the tokens alone, and others by name, "
                         "attention_mask=…, labels=…")


def _whole(model, args, kwargs):
    """Take what is no whole sequence without paddings for an error; a mask that hides nothing is left out."""
    check_named(args)
    positions = kwargs.get("position_ids")
    if positions is not None and (positions.diff(dim=-1) != 1).any():
        raise ValueError("position_ids that begin again, as of packed sequences, beside a mask of blocks: expected "
                         "none; documents_mask keeps sequences apart")
    mask = kwargs.get("attention_mask")
    if mask is not None and (mask.dim() != 2 or not mask.bool().all()):
        raise ValueError(MASKED)
    for name in ("past_key_values", "use_cache"):
        if kwargs.get(name):
            raise ValueError(f"{name} with a mask of blocks: expected none, since it says what each token of a whole "
                             "sequence sees")
    return args, {**{name: x for name, x in kwargs.items() if name != "attention_mask"}, "use_cache": False}


def is_cache(value):
    """Return True for a cache of transformers."""
    return any(each.__module__ == "transformers.cache_utils" for each in type(value).__mro__) or None
