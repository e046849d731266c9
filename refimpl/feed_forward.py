"""What a feed-forward layer of someone else computes, read from its forward.

Layers' names do not say it. Falcon-H1 scales a Llama's layers, DeepSeek-V4 clamps between them, Seed-OSS drops some of
their output, Gemma 3n sets most of the gate to 0. So the forward is traced, with torch.fx: it runs on a proxy that
notes which layer, and which operation, is given what.
"""

import operator

import torch
from torch import fx, nn
from torch.nn import functional as F

# The activations of others, by the names of their classes: torch's and transformers'.
CLASSES = {"SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu", "ReLU": "relu",
           "NewGELUActivation": "gelu_tanh", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh"}
FUNCTIONS = {F.silu: "silu", F.relu: "relu", torch.relu: "relu", F.gelu: "gelu"}
PRODUCTS = (operator.mul, torch.mul)


class _Reader(fx.Tracer):
    """Notes what a forward does with its layers, and not what they do. Nothing is computed."""

    def is_leaf_module(self, module, name):
        return True


def activation_of(mlp, names):
    """Return the name of the activation in the forward of `mlp`. TypeError for one that is not known, and for a forward
    that is not act(x U) D or, with a gate, (act(x G) ∘ x U) D."""
    *gate, up, down = names
    wanted = f"{down}(act({gate[0]}(x)) * {up}(x))" if gate else f"{down}(act({up}(x)))"
    try:
        x, *nodes, result = _Reader().trace(mlp).nodes
    except Exception as error:  # of any kind: it is someone's code, run on what is no tensor
        raise TypeError(f"the forward of {type(mlp).__name__} cannot be read ({error}): expected {wanted}") from error
    inner = _same(_given(_same(result.args[0]), down))
    pair = [_same(each) for each in inner.args] if gate and getattr(inner, "target", None) in PRODUCTS else [inner]
    first = [each for each in pair if _given(each, up) is not x] if gate else pair
    act = first[0] if len(first) == 1 and len(pair) == 1 + len(gate) else None
    if act is None or _given(_same(_given(act)), *(gate or [up])) is not x:
        found = ", ".join(node.name for node in nodes if node.op != "placeholder")
        raise TypeError(f"{type(mlp).__name__} computes {found}: expected {wanted} and nothing else, whose gradient is "
                        "known here")
    if act.op == "call_module":
        layer = mlp.get_submodule(act.target)
        name, kind = type(layer).__name__, CLASSES.get(type(layer).__name__)
        form = getattr(layer, "approximate", "none") if type(layer) is nn.GELU else "none"
    else:
        name, kind = getattr(act.target, "__name__", act.target), FUNCTIONS.get(act.target)
        form = act.kwargs.get("approximate", "none")
    if kind is None:
        raise TypeError(f"{type(mlp).__name__} has the activation {name}: expected one of {', '.join(CLASSES)}, whose "
                        "gradient is known here")
    return "gelu_tanh" if form == "tanh" else kind


def _same(node):
    """Return the node that `node` is but for a factor of 1 and a dropout of 0."""
    while getattr(node, "target", None) in (*PRODUCTS, F.dropout):
        if node.target is F.dropout:
            rest = node.args[:1] if node.kwargs.get("p") == 0 else ()
        else:
            rest = [each for each in node.args if each != 1]
        if len(rest) != 1:
            return node
        node = rest[0]
    return node


def _given(node, name=None):
    """Return what a node computes from, if that is one thing, and the node the layer `name` if a name is given."""
    if not isinstance(node, fx.Node) or len(node.args) != 1 or (name and node.target != name):
        return None
    return node.args[0]
