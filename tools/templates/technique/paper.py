"""SiLU that keeps its input alone, in one screen. A toy from tools/new_technique.py: put your technique here.

For x of n numbers, b bytes each:

    y  = x · σ(x)
    dx = dy · σ(x) · (1 + x · (1 − σ(x)))

    autograd keeps, of the two operations x * sigmoid(x)    2 · n · b     x and σ(x)
    here                                                        n · b     x; backward computes σ(x) again

"Gaussian error linear units" (Hendrycks & Gimpel 2016), section 4, has the function; "Training deep nets with sublinear
memory cost" (Chen et al. 2016), section 3, the idea: drop what is cheap to compute again.
"""

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
        s = torch.sigmoid(x)  # again
        return dy * s * (1 + x * (1 - s))


def silu(x):
    """Return x · σ(x)."""
    return SiLU.apply(x)
