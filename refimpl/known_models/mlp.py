"""What a feed-forward layer of someone else computes, read from its forward.

Names do not say it. A Llama's layers are gate_proj, up_proj and down_proj, GPT-2's c_fc and c_proj; Phi-3 has gate and
up in one weight; Falcon-H1 scales between a Llama's layers, DeepSeek-V4 clamps there, Gemma 3n sets most of the gate to
0. So the forward is traced, with torch.fx: it runs on a proxy that notes which layer, and which operation, is given
what. What stands between the linear layers then runs on tensors without numbers ("meta"), which tell its operations.
"""

import inspect

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..mlp.function import FeedForward, NotFeedForward, run
from ..mlp.toy import shallow

aten = torch.ops.aten
ACTIVATIONS = {aten.silu: "silu", aten.gelu: "gelu", aten.relu: "relu", aten.silu_: "silu", aten.relu_: "relu"}
COPIES = (aten._to_copy, aten.clone)  # beside what PyTorch tags as pointwise, and views
OF_TOKENS = ("bmm", "matmul", "softmax", "attention", "einsum")  # in the names of what other kinds of layer compute
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def read(mlp):
    """Return {whether in training: the FeedForward that a module is}. Computes nothing, and changes nothing of `mlp`.

    TypeError for a feed-forward layer that is none of these, and why; NotFeedForward for other layers.
    """
    layers = [child for child in _children(mlp) if next(child.parameters(), None) is not None]
    with _disable_current_modes(), torch.no_grad():
        if not 2 <= len(layers) <= 3 or not all(map(_is_layer, layers)):
            raise NotFeedForward(f"{type(mlp).__name__} has other layers with weights than 2 or 3 linear ones")
        # dropout and the like differ
        forms = {mode: _read(shallow(mlp).train(mode), type(mlp).__name__) for mode in (True, False)}
    if len({form._replace(inner=None, after=None) for form in forms.values()}) > 1:
        raise TypeError(f"{type(mlp).__name__} computes something else in training than in evaluation")
    return forms


def linear(layer):
    """Tell from what it computes whether a module is a linear layer: None if not, else whether its weight is (in, out),
    as GPT-2's."""
    named = dict(layer.named_parameters())
    weight = named.get("weight")
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or named.keys() - {"weight", "bias"}:
        return None
    # nothing is computed: the operations alone count
    empty = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in named.items()}
    for flipped in (False, True):
        x = torch.empty(2, 3, weight.shape[not flipped], dtype=weight.dtype, device="meta")
        try:
            with _Noted() as noted:
                functional_call(layer, empty, (x,))
        except Exception:  # someone's code, on a shape that need not be its own
            continue
        (func, args, kwargs, _), *more = noted.steps or [(None, (None,), {}, None)]
        if (not more and not kwargs and func is (aten.addmm if "bias" in named else aten.mm).default
                and args[-1].untyped_storage()._cdata == empty["weight"].untyped_storage()._cdata
                and args[-1].is_contiguous() == flipped):
            return flipped
    return None


def _read(mlp, name):
    signature, before = inspect.signature(mlp.forward).parameters.values(), {**vars(mlp)}
    try:
        graph = _Reader().trace(mlp)
    except Exception as error:  # of any kind: it is someone's code, run on what is no tensor
        raise (TypeError if len(signature) == 1 else NotFeedForward)(
            f"the forward of {name} cannot be read ({error})") from error
    weighted = [node for node in graph.nodes if node.op == "call_module"
                and next(mlp.get_submodule(node.target).parameters(), None) is not None]
    if not 2 <= len(weighted) <= 3:
        raise NotFeedForward(f"{name} calls {len(weighted)} linear layers")
    *ups, down = weighted
    placed = [node for node in graph.nodes if node.op == "placeholder"]
    inner = _before(down) - {*ups, *placed}
    after = {node for node in graph.nodes if node.op != "output"} - {*weighted, *placed} - inner
    steps = ", ".join(node.name for node in graph.nodes if node.op not in ("placeholder", "output"))
    if not inner or any(word in node.name for word in OF_TOKENS for node in graph.nodes):
        raise NotFeedForward(f"{name} computes {steps}: no feed-forward layer")

    def need(met, what):
        if not met:
            raise TypeError(f"{name} computes {steps}: {what}")

    called = {key: mlp.get_submodule(key) for key in ("", *(n.target for n in graph.nodes if n.op == "call_module"))}
    altered = [key or name for key, module in called.items() if any(getattr(module, hook) for hook in HOOKS)
               or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__]
    need(not altered, f"{', '.join(altered)} has hooks, or another forward than its class")
    flipped = tuple(linear(mlp.get_submodule(node.target)) for node in weighted)
    for node, each in zip(weighted, flipped, strict=True):
        layer = type(mlp.get_submodule(node.target))
        need(each is not None, f"{node.target} is a {layer.__module__}.{layer.__name__}, which is more than linear")
    need(all(node.args == (placed[0],) for node in ups) and len(down.all_input_nodes) == 1,
         "expected linear layers that are given what the module is, and one that is given what these give")
    need(len({node.target for node in weighted}) == len(weighted), "a linear layer is called twice")
    need(all({*ups} | inner >= {*node.all_input_nodes} for node in inner), "what is given to the last linear layer "
         "does not come from the others alone")
    order = list(graph.nodes)
    need(all(order.index(node) > order.index(down) and not {*ups, *inner} & {*node.all_input_nodes}
             for node in (*after, order[-1])), "expected that no more than one linear layer is given what others give")
    own = {key for key, _ in (*mlp.named_parameters(), *mlp.named_buffers())
           if key.rpartition(".")[0] not in {node.target for node in weighted}}
    own |= {node.target for node in graph.nodes if node.op == "get_attr"}
    need(not own, f"{', '.join(sorted(own))} is more than its linear layers have")
    need(all(each.kind == each.POSITIONAL_OR_KEYWORD for each in signature), "expected a forward with named arguments")
    need(vars(mlp).keys() == before.keys() and all(vars(mlp)[key] is before[key] for key in before),
         "its forward sets attributes of it")
    inner_graph = _part(ups, inner, down.args[0])
    after_graph = _part([down, *placed], after, order[-1].args[0]) if after or len(placed) > 1 else None
    kind = _activation(mlp, inner_graph, [mlp.get_submodule(node.target) for node in ups], flipped, need)
    return FeedForward(tuple(node.target for node in ups), down.target, flipped, inner_graph, after_graph, *kind)


class _Reader(fx.Tracer):
    """Notes what a forward does with its layers, and not what they do. Nothing is computed."""

    def is_leaf_module(self, module, name):
        return not isinstance(module, nn.Sequential)


def _is_layer(module):
    return hasattr(module, "out_features") or linear(module) is not None


def _children(module):
    """Return the modules in a module, those of an nn.Sequential in its place."""
    for child in module.children():
        yield from _children(child) if isinstance(child, nn.Sequential) else (child,)


def _before(node):
    """Return all nodes that a node's value comes from."""
    found, open_ = set(), [node]
    while open_:
        new = set(open_.pop().all_input_nodes) - found
        found |= new
        open_ += new
    return found


def _part(given, nodes, result):
    """Return a graph of some nodes of another, as a function of the values of `given`."""
    graph, new = fx.Graph(), {}
    for node in given:
        new[node] = graph.node_copy(node) if node.op == "placeholder" else graph.placeholder(f"of_{node.name}")
    for node in given[0].graph.nodes:
        if node in nodes:
            new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(fx.node.map_arg(result, new.__getitem__))
    return graph


class _Noted(TorchDispatchMode):
    """Notes operations as [(which, positional arguments, keywords, result)], without views."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        alias = func._schema.returns and func._schema.returns[0].alias_info
        view = alias and not alias.is_write and func is not aten.detach.default
        if not view and func is not aten._unsafe_view.default:
            self.steps.append((func, args, kwargs or {}, out))
        return out


def _activation(mlp, inner, ups, flipped, need):
    """Return (`activation`, `parts`, `hidden`) of FeedForward, from the operations of `inner`: those in bfloat16, too,
    where a cast is one, as under autocast."""
    widths = [up.weight.shape[flip] for up, flip in zip(ups, flipped, strict=False)]
    found = {_operations(mlp, inner, dtype, widths, need) for dtype in (ups[0].weight.dtype, torch.bfloat16)}
    return found.pop() if len(found) == 1 else (None, (), found.pop()[2])


def _operations(mlp, inner, dtype, widths, need):
    given = [torch.empty(2, 3, width, dtype=dtype, device="meta") for width in widths]
    try:
        with _Noted() as noted:
            result = run(inner, mlp, *given)
    except Exception as error:  # someone's code, on tensors without numbers
        need(False, f"what is between the layers cannot be read ({error})")
    for func, *_ in noted.steps:
        need(func.overloadpacket in COPIES or torch.Tag.pointwise in func.tags
             and torch.Tag.nondeterministic_seeded not in func.tags,
             f"{func.name()} between the layers is no function of each number alone")
    owners = {x.untyped_storage()._cdata: k for k, x in enumerate(given)}

    def part(x):
        owner = owners.get(x.untyped_storage()._cdata) if x.shape == result.shape and x.stride()[-1] == 1 else None
        return None if owner is None else (owner, x.storage_offset())

    (act, args, kwargs, out), *product = noted.steps or [(None, (), {}, None)]
    kind = ACTIVATIONS.get(getattr(act, "overloadpacket", None))
    kind = "gelu_tanh" if kind == "gelu" and kwargs.get("approximate") == "tanh" else kind
    others = [x for func, factors, *_ in product for x in factors if func is aten.mul.Tensor and x is not out]
    parts = tuple(part(x) for x in (*others, *args[:1]) if torch.is_tensor(x))
    if (kind and None not in parts and len({*parts}) == len(parts) == 1 + len(product) <= 2
            and sum(widths) == len(parts) * result.shape[-1]):
        return kind, parts, result.shape[-1]
    need(not any(func._schema.is_mutable for func, *_ in noted.steps), "what is between the layers works in place")
    return None, (), result.shape[-1]
