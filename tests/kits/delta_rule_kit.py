"""What the tests of the gated delta rule share: inputs, gradients, and the rule token by token as the oracle."""

import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.papers.linear_attention import recurrent


def inputs(B=2, G=2, H=4, T=40, D=8, V=5, dtype=torch.float64, seed=0, state=True):
    """q, k of length 1, v, gates in the wide dtype, a state; and gradients of the output and of the last state."""
    generator, wide = torch.Generator().manual_seed(seed), torch.promote_types(dtype, torch.float32)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(B, G, T, D), F.normalize(draw(B, G, T, D), dim=-1), draw(B, H, T, V)
    log_decay, beta = -F.softplus(draw(B, H, T) - 2), draw(B, H, T).sigmoid()
    given = [x.to(dtype) for x in (q, k, v)] + [x.to(wide) for x in (log_decay, beta)]
    given.append(draw(B, H, D, V).to(wide) if state else None)
    return [x if x is None else x.requires_grad_() for x in given], (
        draw(B, H, T, V).to(dtype), draw(B, H, D, V).to(wide))


def by_token(q, k, v, log_decay, beta, state_BHDV=None, *, scale=None, delta=True, chunk=None):
    """(out, the last state) of the definition, which has no chunks; q and k for each head of v."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    return recurrent(q * scale, k, v, log_decay, beta, state_BHDV, delta)


def gradients(rule, given, upstream, **options):
    """(out, the last state, gradients of all that is given)."""
    *tensors, state = given
    found = rule(*tensors, state_BHDV=state, **options)
    leaves = [x for x in given if x is not None]
    return *found, *torch.autograd.grad(found, leaves, [g.to(x.dtype) for g, x in zip(upstream, found, strict=True)],
                                        allow_unused=True, materialize_grads=True)


def check_as_exact(rule, given, upstream, **options):
    """At most 2 (gradients 3) times as far from fp64 as the definition is in fp32, or as rounding to the inputs' dtype
    is, and 1e-5."""
    def definition(dtype):
        return gradients(by_token, [x if x is None else x.detach().to(dtype).requires_grad_() for x in given],
                         [x.to(dtype) for x in upstream], **options)

    found = gradients(rule, given, upstream, **options)
    for n, (x, y, z) in enumerate(zip(found, definition(torch.float32), definition(torch.float64), strict=True)):
        most = (3 if n > 1 else 2) * max(distance(y, z), distance(z.to(x.dtype), z)) + 1e-5 * z.abs().max()
        assert distance(x, z) <= most, (n, distance(x, z), most)


def distance(x, y):
    """The largest difference."""
    return (x.double() - y.double()).abs().max()


def read(rule, given, upstream, **options):
    """(kept, peak) bytes above the arguments and the output's gradient, by the tracker; the state is not wanted."""
    import gc

    given = [x if x is None else x.detach() for x in given]
    with memory.track(*(x for x in given if x is not None), upstream[0]) as t:
        out = rule(*(x.requires_grad_() for x in given[:5]), **options)
        gc.collect()  # the interpreter of kernels holds what they were given in cycles
        kept = t.now.total - t.start.total
        out.backward(upstream[0])
    return kept, t.peak.total - t.start.total
