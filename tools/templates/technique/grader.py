"""Exercises of the page NAME."""

import torch

from refimpl import memory

from . import close, drawn, exercise

HINTS = {"first": ["`saved_tensors_hooks`, or a function of your own for autograd, says what waits for backward.",
                   "Compute σ(x) again in backward, from x: dy · σ(x) · (1 + x · (1 − σ(x)))."]}


@exercise("parity and bytes", torch.Tensor)
def first(silu):
    """Grade `silu(x)`, which returns x · σ(x) and keeps x alone until backward."""
    leaf, dy = drawn((64, 32), (64, 32))
    leaf.requires_grad_()
    s = torch.sigmoid(leaf.detach())
    expected, slope = leaf.detach() * s, s * (1 + leaf.detach() * (1 - s))
    with memory.track(leaf, dy) as t:
        y = silu(leaf * 1)
        kept = t.now.total - t.start.total - y.nbytes
    if not close(y.detach(), expected):
        return "the output is another one than x · σ(x)"
    if not y.requires_grad:
        return "the output is right, but no gradient can flow through it"
    (dx,) = torch.autograd.grad(y, leaf, dy)
    if not close(dx, dy * slope):
        return "the output is right, and the gradient is another one than dy · σ(x) · (1 + x · (1 − σ(x)))"
    return None if kept <= leaf.nbytes else (
        f"the numbers are right, but {kept:,} bytes are kept beside the output; x has {leaf.nbytes:,}")
