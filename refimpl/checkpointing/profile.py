"""The costs of a real chain, read off one tracked pass over each stage: what `optimal_schedule` wants to know."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .region import checkpoint
from .schedule import costs

if TYPE_CHECKING:
    from .schedule import Costs


def profile_chain(functions: Sequence[Callable[..., Any]], x: Any, *args: Any, unit: str = "flops",
                  **kwargs: Any) -> "Costs":
    """Measure the Costs of `functions`, each called as f(x, *args, **kwargs) on the tensor that the last one returned.

    Bytes are the tracker's. Times are FLOPs, the same on every machine, or with `unit="seconds"` the shortest of three
    passes. Gradients are added to, as backward does: ValueError if a parameter has none yet, since one that appears in
    this backward would be taken for the stage's own. ValueError also for another unit.
    """
    if unit not in ("flops", "seconds"):
        raise ValueError(f"unit={unit!r}: expected 'flops' or 'seconds'")
    input_bytes, stages = x.untyped_storage().nbytes(), []
    for function in functions:
        x = x.detach().requires_grad_(x.is_floating_point())  # each stage alone: tokens have no gradient
        call = partial(function, x, *args, **kwargs)
        parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
        if any(p.requires_grad and p.grad is None for p in parameters):
            raise ValueError(f"a parameter of {type(function).__name__} has no gradient yet: run one backward first, "
                             "or its bytes would be taken for the stage's")
        read = _flops if unit == "flops" else _seconds
        forward, backward = read(call)
        stage, x = _bytes(call, [x, *parameters])
        stages.append((forward, backward, *stage))
    forward, backward, outputs, kept, forward_peaks, saving_peaks, backward_peaks = zip(*stages, strict=True)
    return costs(forward, kept, outputs, backward_times=backward, forward_peaks=forward_peaks,
                 saving_peaks=saving_peaks, backward_peaks=backward_peaks, input_bytes=input_bytes)


def _bytes(call, existing):
    """Return (a, s, p, q, r) of one stage, in the symbols of `schedule`, and its output, the next stage's input."""
    from ..memory import track

    with track(existing) as dropping:
        following = checkpoint(call)  # F∅, a forward that keeps nothing; then the next stage's input
    with track(existing) as keeping:
        y = call()
        kept, a = keeping.now.total - keeping.start.total, y.untyped_storage().nbytes()
        end = _End.apply(y)  # in place of the loss: backward begins here
        del y
        end.backward()
    start = keeping.start.total
    return (a, kept - a, dropping.peak.total - dropping.start.total,
            keeping.peak_moment("forward").ledger.total - start,
            keeping.peak_moment("backward").ledger.total - start), following


class _End(torch.autograd.Function):
    """Stands for everything after a stage: saves nothing of its output, and returns a new gradient for it."""

    @staticmethod
    def forward(ctx, y):
        ctx.options = y.shape, y.dtype, y.device  # not y: what follows a stage must not keep its output
        return y.new_zeros(())

    @staticmethod
    def backward(ctx, g):
        shape, dtype, device = ctx.options
        return torch.ones(shape, dtype=dtype, device=device)


def _flops(call):
    with FlopCounterMode(display=False) as forward:
        y = call()
    with FlopCounterMode(display=False) as backward:
        _End.apply(y).backward()
    return forward.get_total_flops(), backward.get_total_flops()


def _seconds(call, passes=3):
    found = []
    for _ in range(passes):
        begin = _now()
        y = call()
        between = _now()
        _End.apply(y).backward()
        found.append((between - begin, _now() - between))
    return tuple(map(min, zip(*found, strict=True)))


def _now():
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()  # a GPU computes after the call has returned
    return time.perf_counter()
