"""Forward and backward of an MLP, chunk by chunk, in memory that is used again. `known_models/mlp` reads what an MLP of
another library computes, and describes it as a FeedForward."""

from typing import NamedTuple

import torch
from torch import fx, nn

from ..common.derivatives import refuse_batched_gradients

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
INSTEAD = "plain linear layers"


class NotFeedForward(TypeError):
    """Raised if a module is another kind of layer; a feed-forward one that does more raises TypeError."""


class FeedForward(NamedTuple):
    """A forward that computes after(down(inner(up(x), …)), x, …).

    - `ups`, `down`: names of its linear layers. `flipped`: of each, `down` last, whether its weight is (in, out).
    - `inner`, `after`: what `run` runs. Inner computes of each token alone, and draws no random numbers. None: nothing.
    - `activation`: "silu", "gelu", "gelu_tanh" or "relu" if inner is that, or its product with something else that the
      layers give; else None. `parts`: where its inputs are, the activation's last: [(which of `ups`, first feature)].
    - `hidden`: the number of features that `down` is given.
    """

    ups: tuple
    down: str
    flipped: tuple
    inner: fx.Graph | None
    after: fx.Graph | None
    activation: str | None
    parts: tuple
    hidden: int


def run(graph, module, *given):
    """Run a graph with the modules that `module` has by now."""
    return fx.Interpreter(module, graph=graph).run(*given)


class MLPSettings(NamedTuple):
    """What the layer is given besides tensors."""

    form: FeedForward
    rows: int
    keeps: bool
    module: nn.Module
    ones: tuple  # sizes that a chunk has before its tokens, as x has axes
    autocast: bool

    def parts(self, tensors):
        """Return the columns of what the layers give, or of its gradient, of up and of the activation's input."""
        return [tensors[k][:, first : first + self.form.hidden] for k, first in self.form.parts]

    def inner(self, tensors):
        """Run what is between the layers, as the module does, on a chunk."""
        with torch.autocast(tensors[0].device.type, tensors[0].dtype if self.autocast else None, self.autocast):
            y = run(self.form.inner, self.module, *(x.view(*self.ones, *x.shape) for x in tensors))
        return (y.to(tensors[0].dtype) if self.autocast else y).reshape(-1, self.form.hidden)


class MLPFunction(torch.autograd.Function):
    """Weights of (h, d) and, the last, of (d, h), each with its bias. Shapes: N tokens, R of a chunk, D features, H
    hidden."""

    @staticmethod
    def forward(ctx, settings, x_ND, *parameters):
        with torch.autocast(x_ND.device.type, enabled=False):
            *ups, down = _pairs(settings, parameters, x_ND.dtype)
            N, known = len(x_ND), ACTIVATIONS.get(settings.form.activation)
            out_ND = x_ND.new_empty(N, len(down[0]))  # written chunk by chunk: nothing to concatenate
            kept = [x_ND.new_empty(N if settings.keeps else settings.rows, len(weight)) for weight, _ in ups]
            # kept inputs must not be written over
            spare = x_ND.new_empty(settings.rows, settings.form.hidden) if settings.keeps and known else None
            for at in _chunks(N, settings.rows):
                rows = at.stop - at.start
                inner = [each[at if settings.keeps else slice(rows)] for each in kept]
                for layer, a_R in zip(ups, inner, strict=True):
                    _linear(x_ND[at], *layer, a_R)
                if known:
                    *up_RH, gate_RH = settings.parts(inner)
                    y_RH = gate_RH if spare is None else spare[:rows]
                    known[0](gate_RH, y_RH)
                    if up_RH:
                        y_RH.mul_(*up_RH)
                else:
                    y_RH = settings.inner(inner)
                _linear(y_RH, *down, out_ND[at])
                del y_RH
        ctx.settings = settings
        ctx.save_for_backward(x_ND, *parameters, *(kept if settings.keeps else ()))
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
        totals = [_total(p, x_ND.dtype, ctx.settings.rows < len(x_ND)) if need else None
                  for p, need in zip(parameters, needs, strict=True)]
        _backward(ctx.settings, x_ND, dy_ND, _pairs(ctx.settings, parameters, x_ND.dtype), kept, dx_ND, totals)
        # one after the other: each sum is freed when it is in its parameter's dtype
        return None, dx_ND, *(None if (total := totals.pop(0)) is None else total.to(p.dtype) for p in parameters)


def _backward(settings, x_ND, dy_ND, layers, kept, dx_ND, totals):
    """Write the gradient of x, and add those of the parameters to `totals`, chunk by chunk."""
    *ups, (down_DH, _) = layers
    known, totals_of = settings.form.activation, [*zip(totals[::2], totals[1::2], settings.form.flipped, strict=True)]
    grads, again = ([x_ND.new_empty(settings.rows, len(weight)) for weight, _ in ups] if needed else []
                    for needed in (known, not kept))
    for at in _chunks(len(x_ND), settings.rows):
        rows = slice(at.stop - at.start)
        inner = [_linear(x_ND[at], *layer, each[rows]) for layer, each in zip(ups, again, strict=False)]
        inner = inner or [each[at] for each in kept]
        through = _through if known else _through_any
        work = [each[rows] for each in grads]
        gradients = through(settings, inner, dy_ND[at], down_DH, work, totals_of[-1], not at.start)
        for k, ((weight, _), g_R) in enumerate(zip(ups, gradients, strict=True)):
            _add(totals_of[k], g_R, x_ND[at], not at.start)
            if dx_ND is None:
                continue
            if k == 0:
                torch.mm(g_R, weight, out=dx_ND[at])
            elif again and again[0].numel() >= settings.rows * x_ND.shape[1]:  # rounded twice, as the plain layers' sum
                dx_ND[at] += torch.mm(g_R, weight, out=again[0].view(-1)[: dx_ND[at].numel()].view_as(dx_ND[at]))
            else:
                torch.addmm(dx_ND[at], g_R, weight, out=dx_ND[at])
        del gradients, g_R
    for total in () if len(x_ND) else filter(torch.is_tensor, totals):  # no chunk has written to them
        total.zero_()


def _pairs(settings, parameters, dtype):
    """Return [(weight (out, in), bias), …] in a dtype."""
    cast = [p if p is None else p.to(dtype) for p in parameters]
    return [(weight.T if flipped else weight, bias)
            for weight, bias, flipped in zip(cast[::2], cast[1::2], settings.form.flipped, strict=True)]


def _chunks(N, rows):
    return [slice(first, min(first + rows, N)) for first in range(0, N, rows)]


def _linear(x, weight, bias, out):
    """Compute x · weightᵀ + bias into `out`, and return it."""
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


def _through(settings, inner, dy_RD, down_DH, grads, total, first):
    """Return the gradients by what `inner` holds, in the memory of `grads`; add that of the last layer to its sum."""
    function, slope = ACTIVATIONS[settings.form.activation]
    (*up_RH, gate_RH), (*up_grad, gate_grad) = settings.parts(inner), settings.parts(grads)
    act_RH = up_grad[0] if up_grad else gate_grad  # in memory of a gradient that is not there yet
    function(gate_RH, act_RH)
    _add(total, dy_RD, torch.mul(act_RH, *up_RH, out=gate_grad) if up_RH else act_RH, first)
    dh_RH = torch.mm(dy_RD, down_DH, out=gate_grad)
    if up_RH:
        act_RH.mul_(dh_RH)
        dh_RH.mul_(*up_RH)
    slope(dh_RH, gate_RH, dh_RH)
    return grads


def _through_any(settings, inner, dy_RD, down_DH, _, total, first):
    """Return what `_through` does, by autograd: run the module's own operations once more, with their graph."""
    given = [each.detach().requires_grad_() for each in inner]  # leaves: the graph ends at the linear layers
    with torch.enable_grad():
        y_RH = settings.inner(given)
    _add(total, dy_RD, y_RH.detach(), first)
    return torch.autograd.grad(y_RH, given, torch.mm(dy_RD, down_DH))


def _total(parameter, dtype, chunks):
    """Make the sum of a parameter's gradient: in fp32 if 16-bit chunks add to it, or if autocast cast it."""
    if parameter is None:
        return None
    wide = torch.promote_types(dtype, torch.float32) if chunks else dtype
    return torch.empty_like(parameter, dtype=torch.promote_types(wide, parameter.dtype))


def _add(totals, g, x, first):
    """Add gᵀ x, or xᵀ g to one of (in, out), to a weight's sum, and the rows of g to a bias's."""
    weight, bias, flipped = totals
    if weight is not None:
        a, b = (x.T, g) if flipped else (g.T, x)
        if weight.dtype == g.dtype:
            weight.addmm_(a, b, beta=0 if first else 1)
        elif g.is_cuda:
            aten.addmm.dtype_out(weight, a, b, weight.dtype, beta=0 if first else 1, out=weight)
        else:
            weight.addmm_(a.to(weight.dtype), b.to(weight.dtype), beta=0 if first else 1)
    if bias is not None:
        rows = g.sum(0, dtype=bias.dtype)
        bias.copy_(rows) if first else bias.add_(rows)
