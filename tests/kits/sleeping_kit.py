"""A stage that computes for a known time: its forward, the gradient of its input, and that of its weight.

On one machine ranks share cores, so one that waits gives its core to another and no idle time shows. Stages that sleep
show it. With a `comm.Link`, messages take a known time, too.
"""

import torch
from torch import nn

from refimpl.comm.timed_compute import check_seconds, compute


class SleepingStage(nn.Module):
    """Maps x to x · w, elementwise, and takes so many seconds for its F, its B and its W; a FULL takes both of these.

    `width`: of x's last dimension, and of w. A first stage takes the time of its B, too, though nobody needs it.
    """

    def __init__(self, width, forward=0.0, backward=0.0, weight=0.0):
        super().__init__()
        given = {"forward": forward, "backward": backward, "weight": weight}
        self.seconds = {name: check_seconds(each, name) for name, each in given.items()}
        self.scale = _Scale(width, weight)

    def forward(self, x):
        """Map (…, width) to (…, width)."""
        compute(self.seconds["forward"], "forward")
        x = x if x.requires_grad else x.detach().requires_grad_()
        return self.scale(_Slow.apply(x, self.seconds["backward"]))

    def extra_repr(self):
        return ", ".join(f"{name}={seconds:g}" for name, seconds in self.seconds.items())


class _Scale(nn.Module):
    """Multiplies by w, whose gradient takes `seconds`."""

    def __init__(self, width, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.linspace(0.5, 1.5, width)), seconds

    def forward(self, x):
        return x * _Slow.apply(self.weight, self.seconds)


class _Slow(torch.autograd.Function):
    """Passes x on; takes its time to pass on the gradient."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        compute(ctx.seconds, "backward")
        return gradient, None
