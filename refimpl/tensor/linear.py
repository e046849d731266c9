"""Linear layers over the ranks of a tensor-parallel group: by columns, then by rows.

    Y_r = X A_r       A = [A_1 … A_N]: each rank computes some of the features      ColumnParallelLinear
    Z   = Σ_r Y_r B_r B = [B_1; …; B_N]: and what these features give, summed       RowParallelLinear

What is between the two (GELU, attention by heads) works on this rank's features alone. A layer here is made from a
whole one, and takes its values. "Megatron-LM" (Shoeybi et al. 2019), section 3.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..others import ask_of_others
from ..sharding import ShardSpec, set_spec
from .conjugate import enter, leave, leave_sequence, sequence_sum, whole_sequence
from .vocabulary import gather_logits, own_features, part

if TYPE_CHECKING:
    from ..comm.communicator import Communicator


class ColumnParallelLinear(nn.Module):
    """Computes this rank's features of a linear layer: x (…, C), the same on all ranks, to (…, features / N).

    - `linear`: the whole layer, an `nn.Linear` or transformers' `Conv1D`. Its values are copied.
    - `name`: of the layer in the whole model, for the specs of its weights.
    - `parts`: sizes of layers that are fused in this one, (q, k, v) say. Each is cut by itself.
    - `heads`: for each part, how many heads it has; heads are not cut. With fewer heads than ranks, each is on several
      ranks (grouped queries). By default a feature is a head.
    - `gather_output`: return the features of all ranks, (…, features).

    `weights[i]` and `biases[i]` are this rank's block of part i. In backward the all_reduce of x's gradient runs beside
    the weights' gradients. ValueError if the heads cannot be shared out evenly.
    """

    def __init__(self, linear: Any, comm: "Communicator", name: str = "", *, parts: Any = None, heads: Any = None,
                 gather_output: bool = False) -> None:
        super().__init__()
        self.comm, self.gather_output, self.siblings = comm, gather_output, Siblings([self])
        self.transposed = is_transposed(linear)
        self.in_features, self.features = features_of(linear, name)
        self.parts, self.heads, cuts = column_cuts(linear, comm, name, parts, heads)
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.replicas, first = [], 0
        for size, (begin, end, peers) in zip(self.parts, cuts, strict=True):
            most = max(end - begin, -(-size // comm.world_size))  # heads that several ranks share are more than 1/N
            self.replicas.append(_group(comm, peers))
            numbers = [comm.ranks[peer] for peer in peers] if len(peers) > 1 else ()
            self.weights.append(_block(linear.weight, 1 if self.transposed else 0, first + begin, first + end,
                                       f"{name}.weight", numbers, most))
            if linear.bias is not None:
                self.biases.append(_block(linear.bias, 0, first + begin, first + end, f"{name}.bias", numbers, most))
            first += size

    @torch._disable_dynamo
    def forward(self, x: torch.Tensor, gather: bool | None = None) -> torch.Tensor:
        """Map x (…, C) to this rank's features, or to all of them if they are gathered: as `gather_output` says, or
        here `gather`."""
        y = self.siblings.compute(self, x)
        gather = self.gather_output if gather is None else gather
        return gather_logits(y, self.comm, self.features) if gather else y

    def weights_in(self, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Return [(weight (n, C), bias or None)] of all parts in `dtype`. A part that other ranks hold, too, gets the
        sum of their gradients."""
        biases = self.biases or [None] * len(self.weights)
        found = []
        for weight, bias, replicas in zip(self.weights, biases, self.replicas, strict=True):
            if replicas is not None:
                # Each of these ranks has a part of the queries that read it, so a part of its gradient.
                weight, bias = enter(weight, replicas), None if bias is None else enter(bias, replicas)
            weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            found.append((weight.t() if self.transposed else weight, bias))
        return found

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.features}, parts={self.parts}, {self.comm.place}"


class Siblings:
    """Layers that read the same x, q, k and v say: the first that is called computes all of them, so that x's gradient
    is summed over the ranks once. If another is called with another x, they are computed apart from then on."""

    def __init__(self, layers):
        self.layers, self.apart = layers, len(layers) == 1
        self.x, self.ready = None, {}  # what was read last; layer -> its features of that, until it is called
        for layer in layers:
            layer.siblings = self

    def compute(self, layer, x):
        """Return this rank's features of `layer`."""
        if layer in self.ready:
            if self.x() is x:
                return self.ready.pop(layer)
            self.apart = True  # as in cross-attention: q of one x, k and v of another
        self.ready = {}
        if self.apart:
            return columns(x, [layer])[0]
        self.x = weakref.ref(x)  # weak: else x would live until the next forward
        self.ready = dict(zip(self.layers, columns(x, self.layers), strict=True))
        return self.ready.pop(layer)


def columns(x, layers):
    """Return, for each layer, this rank's features of x (…, C). Where x was gathered by `sequence_parallel`, autograd
    keeps the rows of this rank alone."""
    rows, tokens = getattr(x, "sequence_rows", None) or (x, None)
    dtype = _computed_in(x, layers[0].weights[0])
    pairs = [layer.weights_in(dtype) for layer in layers]
    flat = [each for pair in pairs for weight_and_bias in pair for each in weight_and_bias]
    whole = x.detach().to(dtype) if tokens is not None else None  # autograd sees the rows alone, and keeps 1/N
    outputs = _ColumnProducts.apply(rows.to(dtype), whole, tokens, layers[0].comm, [len(pair) for pair in pairs], *flat)
    return outputs if isinstance(outputs, tuple) else (outputs,)


class _ColumnProducts(torch.autograd.Function):
    """Y = X Aᵀ + b of several layers, of several parts each; X is whole, or this rank's rows with what was gathered."""

    @staticmethod
    def forward(ctx, x, whole, tokens, comm, counts, *flat):
        weights, biases = flat[::2], flat[1::2]
        ctx.comm, ctx.tokens, ctx.counts, ctx.biased = comm, tokens, counts, [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)  # of features that nobody used None comes, not zeros to multiply
        whole, outputs, at = x if tokens is None else whole, [], 0
        for count in counts:
            outputs.append(_fused(whole, weights[at : at + count], biases[at : at + count]))
            at += count
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *dys):
        x, *weights = ctx.saved_tensors
        of_x, of_weights, of_biases = ctx.needs_input_grad[0], ctx.needs_input_grad[5::2], ctx.needs_input_grad[6::2]
        parts = _parts(dys, ctx.counts, weights)
        dx = landed = gathered = None
        if ctx.tokens is not None and any(of_weights):
            gathered = whole_sequence(x, ctx.comm, ctx.tokens, async_op=True)  # beside dx
        if of_x:
            for dy, weight in zip(parts, weights, strict=True):
                if dy is not None:
                    dx = dy @ weight if dx is None else dx.addmm_(dy, weight)  # one dx for q, k and v: one all_reduce
            landed = _reduced(dx, x, ctx)  # beside the weights' gradients
        whole = x if gathered is None else gathered()
        rows = whole.reshape(-1, whole.shape[-1]) if any(of_weights) else None
        grads = []
        for dy, w, b in zip(parts, of_weights, of_biases, strict=True):
            grads.append(dy.t() @ rows if w and dy is not None else None)
            grads.append(dy.sum(0) if b and dy is not None else None)
        return landed() if of_x else None, None, None, None, None, *grads


def _reduced(dx, x, ctx):
    """Begin the sum of dx, (tokens, C), over the ranks. Returns a function that waits for it."""
    if ctx.tokens is not None:
        return sequence_sum(dx.view(*ctx.tokens, -1), ctx.comm, async_op=True)
    handle = ctx.comm.all_reduce(dx, out=dx, async_op=True)  # in place: dx was made here
    return lambda: handle.wait().view(x.shape)


def _fused(x, weights, biases):
    """Return x Aᵀ + b, (…, n), the features of all parts side by side."""
    if len(weights) == 1:
        return F.linear(x, weights[0], biases[0])
    rows = x.reshape(-1, x.shape[-1])
    y, at = rows.new_empty(len(rows), sum(len(weight) for weight in weights)), 0
    for weight, bias in zip(weights, biases, strict=True):
        out = y[:, at : at + len(weight)]  # products go straight to their columns: no copy to join q, k and v
        torch.mm(rows, weight.t(), out=out) if bias is None else torch.addmm(bias, rows, weight.t(), out=out)
        at += len(weight)
    return y.view(*x.shape[:-1], -1)


def _parts(dys, counts, weights):
    """Return the gradient of each part, (tokens, n), as a view of its layer's, or None where there is none."""
    found, weights = [], iter(weights)
    for dy, count in zip(dys, counts, strict=True):
        sizes = [len(next(weights)) for _ in range(count)]
        found += [None] * count if dy is None else dy.reshape(-1, sum(sizes)).split(sizes, dim=1)
    return found


class RowParallelLinear(nn.Module):
    """Computes a linear layer of which each rank has some of the inputs: x (…, C / N) to the output (…, features), the
    same on all ranks, or with `sequence` to this rank's rows of it (`sequence_parallel`).

    - `linear`: the whole layer, an `nn.Linear` or transformers' `Conv1D`. Its values are copied.
    - `name`: of the layer in the whole model, for the specs of its weights.
    - `heads`: of the inputs; heads are not cut.
    - `of_whole`: x is (…, C), the same on all ranks, and each takes its own features of it.

    Every rank holds the whole bias, and adds it to the sum.
    """

    def __init__(self, linear: Any, comm: "Communicator", name: str = "", *, heads: Any = None,
                 of_whole: bool = False) -> None:
        super().__init__()
        self.comm, self.sequence, self.of_whole = comm, False, of_whole
        self.transposed = is_transposed(linear)
        self.in_features, self.features = features_of(linear, name)
        begin, end = row_cut(linear, comm, name, heads)
        self.weight = _block(linear.weight, 0 if self.transposed else 1, begin, end, f"{name}.weight", (),
                             max(end - begin, -(-self.in_features // comm.world_size)))
        self.bias = None
        if linear.bias is not None:
            replicas = comm.ranks if comm.world_size > 1 else ()
            self.bias = _block(linear.bias, 0, 0, self.features, f"{name}.bias", replicas, self.features)

    @torch._disable_dynamo
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map this rank's inputs (…, C / N) to the output, the same on all ranks."""
        x = own_features(x, self.comm) if self.of_whole else x
        y = F.linear(x, self.weight.t() if self.transposed else self.weight)
        y = leave_sequence(y, self.comm) if self.sequence else leave(y, self.comm)
        # Added to the sum: added to each rank's part, it would count N times.
        return y if self.bias is None else y.add_(self.bias.to(y.dtype))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.features}, {self.comm.place}"


def is_transposed(linear):
    """Tell whether the layer's weight is (in, out), as that of transformers' Conv1D is."""
    return bool(ask_of_others("transposed", linear))


def features_of(linear, name=""):
    """Return (in, out) of a linear layer. TypeError for a layer that is none, or computes something else."""
    weight = linear._parameters.get("weight")
    if isinstance(ask_of_others("adapted", linear), nn.Linear):  # before it is split, or made
        raise TypeError(f"{name} is of peft's {type(linear).__name__}, which has a layer and its adapters: expected a "
                        f"plan of these. By columns: {{'{name}.base_layer': 'column', '{name}.lora_B.*': 'column'}}; "
                        f"by rows: {{'{name}.base_layer': 'row', '{name}.lora_A.*': 'row'}}")
    if weight is None or type(linear).forward is not nn.Linear.forward and not is_transposed(linear):
        raise TypeError(f"{name} is of {type(linear).__name__}: expected an nn.Linear or transformers' Conv1D, with "
                        "its own forward and a plain weight; leave it out of the plan to keep it whole")
    return tuple(weight.shape) if is_transposed(linear) else tuple(weight.shape[::-1])


def column_cuts(linear, comm, name="", parts=None, heads=None):
    """Return the sizes of a layer's parts, their heads, and for each (begin, end, ranks that have the same): what this
    rank has of its output features. ValueError if they cannot be shared out evenly."""
    _, features = features_of(linear, name)
    parts = tuple(parts or [features])
    if sum(parts) != features:
        raise ValueError(f"{name}: parts {parts} of {features} features: expected their sum")
    heads = tuple(heads or parts)
    return parts, heads, [_heads_of(comm, count, size, name) for size, count in zip(parts, heads, strict=True)]


def row_cut(linear, comm, name="", heads=None):
    """Return (begin, end) of this rank's input features. ValueError if they cannot be shared out evenly."""
    size, _ = features_of(linear, name)
    return _heads_of(comm, heads or size, size, name)[:2]


def _heads_of(comm, heads, size, name):
    """Return (begin, end) of the features of this rank's heads, and the ranks that have the same."""
    N, r = comm.world_size, comm.rank
    if size % heads:
        raise ValueError(f"{name}: {size} features in {heads} heads: expected as many features in each head")
    width = size // heads
    if heads == size:  # features, of which one rank may have one more than another
        return *part(size, comm, name), (r,)
    if heads % N and N % heads:
        raise ValueError(f"{name}: {heads} heads on {N} ranks: expected a multiple of the ranks, or a divisor of them; "
                         "choose a tensor-parallel size that divides the heads")
    shared = max(1, N // heads)  # ranks with the same head
    each = max(1, heads // N)
    first = r // shared * each
    return first * width, (first + each) * width, tuple(range(r // shared * shared, (r // shared + 1) * shared))


_groups = weakref.WeakKeyDictionary()  # communicator → {ranks that hold the same: theirs}


def _group(comm, peers):
    """Return the communicator of the ranks that hold the same block, one for all layers; None for this rank alone. All
    ranks call it together."""
    if len(peers) in (1, comm.world_size):
        return comm if len(peers) > 1 else None
    made = _groups.setdefault(comm, {})
    if peers not in made:
        made[peers] = comm.split(peers)
    return made[peers]


def _block(tensor, dim, begin, end, name, replicas, most):
    """Return this rank's block of a whole parameter, copied, with its spec. `most`: of any rank, along `dim`."""
    # A copy: a view would keep the whole weight alive.
    value = tensor.detach().narrow(dim, begin, end - begin).clone(memory_format=torch.contiguous_format)
    block = nn.Parameter(value, requires_grad=tensor.requires_grad)
    offsets = [0] * tensor.dim()
    offsets[dim] = begin
    spec = ShardSpec(name, tuple(tensor.shape), tuple(offsets), tuple(value.shape), replicas=tuple(replicas))
    set_spec(block, spec, (name,), value.numel() // (end - begin) * most)
    return block


def _computed_in(x, weight):
    """Return the dtype in which a linear layer would compute here. Any kind of autocast tells, when it multiplies two
    matrices without rows."""
    with torch.no_grad():
        return F.linear(x.new_empty(0, 1), weight.new_empty(0, 1)).dtype


