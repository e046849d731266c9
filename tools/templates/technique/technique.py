"""The function that users call. It computes what the paper computes, and says what it cannot take."""

import torch


class SiLU(torch.autograd.Function):
    """x · σ(x), of which x is kept."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)  # of plain operations, so that a second derivative is right, too
        return dy * s * (1 + x * (1 - s))


def silu(x):
    """Compute x · σ(x), and keep x alone until backward. TypeError for a tensor of integers or complex numbers."""
    if not x.is_floating_point():
        raise TypeError(f"x is of {x.dtype}: expected a floating dtype, as torch.float32; convert it with x.float()")
    return SiLU.apply(x)
