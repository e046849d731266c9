"""Computation of a known time: a rank sleeps as long as a GPU would compute, and takes no core from the others.

Together with a `Link`, communication and computation take known times, on ranks that share two cores, too:

    comm.link = Link(bytes_per_second=10e6)
    handle = comm.all_gather(shard, async_op=True)
    compute(0.2)
    handle.wait()                            # returns max(0.2, comm.link.seconds(…)) after all_gather was called
"""

import torch
from torch._guards import active_fake_mode

from ..common.spans import computing
from .backend.clock import now, sleep_until


def compute(seconds: float, kind: str = "compute", name: str = "") -> None:
    """Take `seconds`, as a computation of this length would, without using a core. Collectives go on meanwhile.

    An active recorder (`common.spans`, `rank_timeline`) gets a span of this kind and name. `launch` counts a rank in it
    as one that computes: it is not hung, whatever its `timeout`. In a dry run no time passes. ValueError for a number
    below 0.
    """
    seconds = check_seconds(seconds, "seconds")
    with computing(kind, name):
        if active_fake_mode() is None:
            sleep_until(now() + seconds)


class Delay(torch.nn.Module):
    """Passes its input on, and takes `forward` seconds for that; and `backward` seconds to pass on the gradient.

    So a model's stage computes for a known time: `nn.Sequential(layer, Delay(forward=0.1, backward=0.2))`. Put it where
    a gradient passes, after a layer with parameters; elsewhere backward does not come by. `name`: of its spans.
    """

    def __init__(self, forward: float = 0.0, backward: float = 0.0, name: str = "") -> None:
        super().__init__()
        self.seconds = {"forward": check_seconds(forward, "forward"), "backward": check_seconds(backward, "backward")}
        self.name = name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compute(self.seconds["forward"], "forward", self.name)
        return _SlowGradient.apply(x, self.seconds["backward"], self.name)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={seconds:g}" for name, seconds in self.seconds.items())


class _SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds, name):
        ctx.seconds, ctx.of = seconds, name
        return x.detach()  # the same memory, and no view to autograd: a next layer may work in place

    @staticmethod
    def backward(ctx, gradient):
        compute(ctx.seconds, "backward", ctx.of)
        return gradient, None, None


def check_seconds(seconds, name):
    """Return `seconds`. ValueError naming the argument if they are below 0 or infinite."""
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{name}={seconds!r}: expected a number of seconds, 0 or more")
    return seconds
