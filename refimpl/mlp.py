"""An MLP whose hidden layer is not kept: computed again in backward, or kept once, and some tokens at a time.

The hidden layer of N tokens is h wide, four times d or so, and autograd keeps it more than once:

    act(x Uᵀ) Dᵀ                     plain: x Uᵀ and act(x Uᵀ)                          2 · N·h
    (act(x Gᵀ) ∘ x Uᵀ) Dᵀ            plain: x Gᵀ, x Uᵀ, act(x Gᵀ) and their product     4 · N·h     SwiGLU and the like

    keep="input"       nothing but x, which the layer before gave; backward multiplies x by U (and G) again:
                       7 matrix products of this size instead of 6, or 11 instead of 9
    keep="hidden"      what goes into the activation, 1 or 2 · N·h; backward computes activations again, no product

A token's hidden layer is of use for that token alone. So forward and backward can go `chunk_size` tokens at a time,
too: then neither holds more than a chunk of whatever is not kept. Recomputation: "Training Deep Nets with Sublinear
Memory Cost" (Chen et al. 2016). Chunks of a feed-forward layer: "Reformer" (Kitaev et al. 2020), section 3. SwiGLU:
"GLU Variants Improve Transformer" (Shazeer 2020).
"""

from typing import NamedTuple

import torch
from torch import nn

from .feed_forward import activation_of
from .memory.derivatives import refuse_batched_gradients, refuse_transforms

aten = torch.ops.aten

# name → (the function, into `out`; the gradient by its input, into `grad_input`)
ACTIVATIONS = {
    "gelu": (lambda x, out: aten.gelu.out(x, out=out),
             lambda g, x, out: aten.gelu_backward.grad_input(g, x, grad_input=out)),
    "gelu_tanh": (lambda x, out: aten.gelu.out(x, approximate="tanh", out=out),
                  lambda g, x, out: aten.gelu_backward.grad_input(g, x, approximate="tanh", grad_input=out)),
    "silu": (lambda x, out: aten.silu.out(x, out=out),
             lambda g, x, out: aten.silu_backward.grad_input(g, x, grad_input=out)),
    "relu": (lambda x, out: torch.clamp(x, min=0, out=out),
             lambda g, x, out: aten.threshold_backward.grad_input(g, x, 0, grad_input=out)),
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
KEEP = ("input", "hidden")
INSTEAD = "plain linear layers"
NAMES = (("gate_proj", "up_proj", "down_proj"), ("gate", "up", "down"))  # of a Llama's layers, and of our GPT's


class MemoryEfficientMLP(nn.Module):
    """Computes act(x U) D, or (act(x G) ∘ x U) D, without keeping the hidden layer for backward.

        mlp = MemoryEfficientMLP(d, hidden, "swiglu", bias=False)
        block.mlp = MemoryEfficientMLP.of(block.mlp)           # of a Llama: same Parameters, same names
        memory_efficient_mlps(model)                           # every such MLP of a model

    - `activation`: "gelu", "gelu_tanh", "silu", "relu"; with a gate "swiglu", "geglu", "geglu_tanh", "reglu".
    - `keep`: "input" or "hidden", what is kept for backward. `chunk_size`: tokens at a time; by default all.

    Numbers are those of the plain layers: each token's forward to the bit where the products are, gradients of weights
    up to the order of summation. With chunks the weights' gradients of 16-bit layers are summed in fp32 and rounded
    once. `mlp_bytes` gives the bytes. Under autocast x and weights are cast to its dtype, for the time of the call;
    fp64 is not, as in plain layers.

    The linear layers are not called, so hooks on them do not run. Raises ValueError for unknown names and sizes,
    TypeError for dtypes that differ, RuntimeError for `create_graph=True`, a batch of gradients and
    transforms of torch.func.
    """

    def __init__(self, d, hidden, activation="gelu", *, bias=True, keep="input", chunk_size=None, dtype=None,
                 device=None):
        super().__init__()
        self._set({name: nn.Linear(*(hidden, d) if name == "down_proj" else (d, hidden), bias, device, dtype)
                   for name in NAMES[0][activation not in GATED :]}, activation, keep, chunk_size)

    def _set(self, linears, activation, keep, chunk_size):
        if activation not in ACTIVATIONS and activation not in GATED:
            raise ValueError(f"activation={activation!r}: expected one of {', '.join((*ACTIVATIONS, *GATED))}")
        if keep not in KEEP:
            raise ValueError(f"keep={keep!r}: expected 'input' or 'hidden'")
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise ValueError(f"chunk_size={chunk_size!r}: expected an integer of at least 1, in tokens, or None")
        self.activation, self.keep, self.chunk_size, self.names = activation, keep, chunk_size, tuple(linears)
        for name, linear in linears.items():
            self.add_module(name, linear)

    @classmethod
    def of(cls, mlp, *, keep="input", chunk_size=None):
        """Return a MemoryEfficientMLP of the layers of `mlp`, which must be a Llama's (gate_proj, up_proj, down_proj,
        act_fn) or our GPT's: same Parameters under the same names. TypeError for any other, and for one whose forward
        does more with these layers: a factor, a clamp, dropout."""
        names = next((names for names in NAMES if hasattr(mlp, names[1]) and hasattr(mlp, names[2])), NAMES[0])
        linears = {name: getattr(mlp, name) for name in names if getattr(mlp, name, None) is not None}
        others = [name for name, child in mlp.named_children() if name not in linears and name != "act_fn"]
        if len(linears) < 2 or others or any(type(linear) is not nn.Linear for linear in linears.values()):
            found = ", ".join(f"{name}: {type(child).__name__}" for name, child in mlp.named_children())
            raise TypeError(f"{type(mlp).__name__} has {found or 'no layers'}: expected nn.Linear layers named "
                            f"{', '.join(NAMES[0])} or {', '.join(NAMES[1])}, and at most an act_fn beside them")
        kind = activation_of(mlp, tuple(linears))
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        kind = kind if len(linears) == 2 else next(gated for gated, plain in GATED.items() if plain == kind)
        self._set(linears, kind, keep, chunk_size)
        return self.train(mlp.training)

    def extra_repr(self):
        return f"{self.activation}, keep={self.keep}, chunk_size={self.chunk_size}"

    @torch._disable_dynamo
    def forward(self, x):
        """Return the layer's output for x (…, d): (…, d)."""
        *gate, up, down = (getattr(self, name) for name in self.names)
        dtype, device = x.dtype, x.device.type
        if torch.is_autocast_enabled(device) and torch.float64 not in (dtype, up.weight.dtype, down.weight.dtype):
            dtype = torch.get_autocast_dtype(device)
        elif up.weight.dtype != dtype or down.weight.dtype != dtype:
            raise TypeError(f"x is of {dtype}, the weights of {up.weight.dtype} and {down.weight.dtype}: expected one "
                            "dtype (or autocast)")
        if x.shape[-1] != up.in_features:
            raise ValueError(f"x {tuple(x.shape)}: expected (…, {up.in_features})")
        parameters = [p for layer in (up, down, *gate) for p in (layer.weight, layer.bias)]
        refuse_transforms("MemoryEfficientMLP", INSTEAD, (x, *parameters))
        x_ND = x.to(dtype).reshape(-1, x.shape[-1])
        rows = max(1, min(len(x_ND), self.chunk_size or len(x_ND)))
        trained = torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (x, *parameters))
        plan = _Plan(GATED.get(self.activation, self.activation), rows, self.keep == "hidden" and trained)
        return _MLP.apply(plan, x_ND, *parameters).view(*x.shape[:-1], down.out_features)


class _Plan(NamedTuple):
    """What the layer is given besides tensors."""

    activation: str
    rows: int
    keeps: bool


class _MLP(torch.autograd.Function):
    """up, gate: (h, d) and (h,); down: (d, h) and (d,). Shapes: N tokens, R of a chunk, D features, H hidden."""

    @staticmethod
    def forward(ctx, plan, x_ND, *parameters):
        with torch.autocast(x_ND.device.type, enabled=False):
            up, down, *gate = _pairs(parameters, x_ND.dtype)
            N, H = len(x_ND), len(up[0])
            out_ND, act = x_ND.new_empty(N, len(down[0])), ACTIVATIONS[plan.activation][0]
            kept = [x_ND.new_empty(N if plan.keeps else plan.rows, H) for _ in (up, *gate)]
            result_RH = x_ND.new_empty(plan.rows, H) if plan.keeps else kept[-1]
            for at in _chunks(N, plan.rows):
                inner = [each[at if plan.keeps else slice(at.stop - at.start)] for each in kept]
                for layer, a_RH in zip((up, *gate), inner, strict=True):
                    _linear(x_ND[at], *layer, a_RH)
                y_RH = result_RH[: at.stop - at.start]
                act(inner[-1], y_RH)
                if gate:
                    y_RH.mul_(inner[0])
                _linear(y_RH, *down, out_ND[at])
        ctx.plan = plan
        ctx.save_for_backward(x_ND, *parameters, *(kept if plan.keeps else ()))
        return out_ND

    @staticmethod
    def backward(ctx, dy_ND):
        refuse_batched_gradients("MemoryEfficientMLP", INSTEAD, dy_ND)
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True for a MemoryEfficientMLP: its gradients have no graph. For second "
                               f"derivatives, use {INSTEAD}")
        x_ND, *saved = ctx.saved_tensors
        needs_x, *needs = ctx.needs_input_grad[1:]
        parameters, kept = saved[: len(needs)], saved[len(needs) :]
        dx_ND = torch.empty_like(x_ND) if needs_x else None
        totals = [_total(p, x_ND.dtype, ctx.plan.rows < len(x_ND)) if need else None
                  for p, need in zip(parameters, needs, strict=True)]
        _backward(ctx.plan, x_ND, dy_ND, _pairs(parameters, x_ND.dtype), kept, dx_ND, totals)
        # one after the other: each sum is freed when it is in its parameter's dtype
        return None, dx_ND, *(None if (total := totals.pop(0)) is None else total.to(p.dtype) for p in parameters)


def _backward(plan, x_ND, dy_ND, layers, kept, dx_ND, totals):
    """Write the gradient of x, and add those of the parameters to `totals`, chunk by chunk."""
    up, down, *gate = layers
    buffers = [x_ND.new_empty(plan.rows, len(up[0])) for _ in range((1 + bool(gate)) * (1 if kept else 2))]
    for at in _chunks(len(x_ND), plan.rows):
        inner = [each[at] for each in kept]
        work = [each[: at.stop - at.start] for each in buffers]
        if not kept:
            inner = [_linear(x_ND[at], *layer, work.pop()) for layer in (up, *gate)]
        _add(totals[2:4], dy_ND[at], _hidden(plan, inner, work), at.start == 0)
        gradients = _through(plan, dy_ND[at], down[0], inner, work)
        for k, (layer, total, g_RH) in enumerate(zip((up, *gate), (totals[:2], totals[4:]), gradients, strict=False)):
            _add(total, g_RH, x_ND[at], at.start == 0)
            if dx_ND is not None:
                torch.addmm(dx_ND[at], g_RH, layer[0], beta=min(k, 1), out=dx_ND[at])
    for total in () if len(x_ND) else filter(torch.is_tensor, totals):
        total.zero_()


def _pairs(parameters, dtype):
    """Return [(weight, bias), …] in a dtype."""
    cast = [p if p is None else p.to(dtype) for p in parameters]
    return [*zip(cast[::2], cast[1::2], strict=True)]


def _chunks(N, rows):
    return [slice(first, min(first + rows, N)) for first in range(0, N, rows)]


def _linear(x, weight, bias, out):
    """Compute x · weightᵀ + bias into `out`, and return it."""
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _hidden(plan, inner, work):
    """Return the hidden layer of a chunk in work[0]; with a gate, its activation is left in work[1]."""
    ACTIVATIONS[plan.activation][0](inner[-1], work[len(inner) - 1])
    return work[0] if len(inner) == 1 else torch.mul(work[1], inner[0], out=work[0])


def _through(plan, dy_RD, down_DH, inner, work):
    """Return the gradients by what `inner` holds, x Uᵀ and x Gᵀ, in the memory of `work`."""
    slope, dh_RH = ACTIVATIONS[plan.activation][1], torch.mm(dy_RD, down_DH, out=work[0])
    if len(inner) == 1:
        return [slope(dh_RH, inner[0], dh_RH)]
    up_RH = work[1].mul_(dh_RH)
    return [up_RH, slope(dh_RH.mul_(inner[0]), inner[1], dh_RH)]


def _total(parameter, dtype, chunks):
    """Make the sum of a parameter's gradient: in fp32 if 16-bit chunks add to it, or if autocast cast it."""
    if parameter is None:
        return None
    wide = torch.promote_types(dtype, torch.float32) if chunks else dtype
    return torch.empty_like(parameter, dtype=torch.promote_types(wide, parameter.dtype))


def _add(totals, g, x, first):
    """Add gᵀ x to a weight's sum, and the rows of g to a bias's."""
    weight, bias = totals
    if weight is not None:
        if weight.dtype == g.dtype:
            weight.addmm_(g.T, x, beta=0 if first else 1)
        elif g.is_cuda:
            aten.addmm.dtype_out(weight, g.T, x, weight.dtype, beta=0 if first else 1, out=weight)
        else:
            weight.addmm_(g.T.to(weight.dtype), x.to(weight.dtype), beta=0 if first else 1)
    if bias is not None:
        rows = g.sum(0, dtype=bias.dtype)
        bias.copy_(rows) if first else bias.add_(rows)


def memory_efficient_mlps(model, *, keep="input", chunk_size=None):
    """Replace every MLP of a model that `MemoryEfficientMLP.of` knows by its layers' names; return how many.

    Models of transformers with a Llama's MLP (Mistral, Qwen, Gemma) and our GPT. Parameters and state_dict stay the
    same. Raises ValueError if there is none, TypeError for one with these names whose layers are something else.
    """
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()
             if not isinstance(child, MemoryEfficientMLP)
             and any(hasattr(child, names[1]) and hasattr(child, names[2]) for names in NAMES)]
    made = [MemoryEfficientMLP.of(child, keep=keep, chunk_size=chunk_size) for _, _, child in found]
    if not made:
        raise ValueError(f"{type(model).__name__} has no MLP with layers named {NAMES[0][1]} and {NAMES[0][2]}, or "
                         f"{NAMES[1][1]} and {NAMES[1][2]}: put MemoryEfficientMLP(d, hidden, activation) in its place")
    for (parent, name, _), mlp in zip(found, made, strict=True):
        setattr(parent, name, mlp)
    return len(made)


class MLPBytes(NamedTuple):
    """Bytes above x, the parameters and the output's gradient: what autograd keeps beside the output, and the peaks of
    forward and of backward, both with what is kept and with the output."""

    saved: int
    forward: int
    backward: int


def plain_mlp_saved_bytes(N, hidden, dtype=torch.float32, *, activation="gelu"):
    """Return the bytes that autograd keeps of plain layers, beside x: 2·N·h·e, 4·N·h·e with a gate, e bytes each; of
    ReLU it does not keep the input."""
    return N * hidden * dtype.itemsize * ((4 if activation in GATED else 2) - (activation in ("relu", "reglu")))


def mlp_bytes(N, d, hidden, dtype=torch.float32, *, activation="gelu", bias=True, keep="input", chunk_size=None,
              device="cpu"):
    """Return MLPBytes of a MemoryEfficientMLP for N tokens, output and all gradients included, without autocast.

        saved       m·N·h·e if keep is "hidden", else 0               m = 1, or 2 with a gate; e bytes an element
        forward     N·d·e + saved + (1 if keep is "hidden", else m)·R·h·e             R = chunk_size
        backward    saved + 2·N·d·e + P·w + max(work, narrow)         P parameters; w = 4 if 16-bit chunks are summed
        work        (1 or 2)·m·R·h·e + max(wide, h·w)                 once if keep is "hidden"; a bias's sum
        wide        R·(d + h)·4                                       16-bit chunks on a CPU: two factors in fp32
        narrow      d·h·e                                             16-bit chunks: one gradient in its own dtype
    """
    m, e, R = 1 + (activation in GATED), dtype.itemsize, min(chunk_size or N, N)
    summed = R < N and e == 2
    w = 4 if summed else e
    keeps = keep == "hidden"
    saved = m * N * hidden * e * keeps
    forward = N * d * e + saved + (1 if keeps else m) * R * hidden * e
    wide = R * (d + hidden) * 4 * (summed and device == "cpu")
    work = (1 if keeps else 2) * m * R * hidden * e + max(wide, bias * max(d, hidden) * w)
    P = (1 + m) * d * hidden + bias * (d + m * hidden)
    return MLPBytes(saved, forward, saved + 2 * N * d * e + P * w + max(work, d * hidden * e * summed))
