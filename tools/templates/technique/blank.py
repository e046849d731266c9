"""What the page NAME has its reader build."""

import torch

from exercises import close, drawn
from refimpl import memory

from . import blank

HINTS = {"silu_from_x": ["A `torch.autograd.Function` decides itself what it saves: `ctx.save_for_backward(x)`.",
                         "Its backward may compute what it did not save: dy · σ(x) · (1 + x · (1 − σ(x)))."]}


def silu_from_x(x):
    """Return x · σ(x), of the shape of x. Until backward x alone is kept, its number of bytes."""
    def again(x):
        return x * torch.sigmoid(x)

    return torch.utils.checkpoint.checkpoint(again, x, use_reentrant=False, preserve_rng_state=False)


@blank(silu_from_x, "parity and bytes", torch.Tensor)
def check_silu(silu):
    """Compare output and gradient with the closed forms, then read the bytes that wait for backward."""
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
