"""The largest micro-batch that fits in a budget, found by dry runs or by real runs on a device.

The effective batch stays the same and is only cut differently, so neither the optimizer's step nor the learning rate
changes.
"""

import gc
import math
import traceback
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from tqdm import tqdm

from ..common.ledger import human


@dataclass(frozen=True)
class MicroBatch:
    """Holds what `find_micro_batch` found.

    - `micro_batch`: the number of rows, for `accumulate(…, micro_batch=…)`. `micro_batches`: how many micro-batches
      that makes of the effective batch; the last may have fewer rows.
    - `nbytes`: the peak of a step with it, in bytes. `budget`: the budget in bytes, or None.
    - `tried`: {rows: bytes} of every size that was run; None for a size that ran out of memory.
    """

    micro_batch: int
    micro_batches: int
    effective_batch: int
    nbytes: int
    budget: int | None
    tried: dict

    def __str__(self):
        parts, rest = divmod(self.effective_batch, self.micro_batch)
        cut = f"{parts} × {self.micro_batch}" + (f" + {rest}" if rest else "")
        of = "" if self.budget is None else f" of {human(self.budget)}"
        return f"micro_batch={self.micro_batch}: {self.effective_batch} rows = {cut}, peak {human(self.nbytes)}{of}"


def find_micro_batch(step: Callable[..., Any], effective_batch: int, budget: int, *args: Any, equal: bool = False,
                     probe: bool = False, device: torch.device | str | None = None) -> MicroBatch:
    """Find the largest number of rows for which `step(rows, *args)` peaks within `budget` bytes: a MicroBatch.

        def step(rows, model, optimizer):
            tokens = torch.zeros(min(3 * rows, 64), 1024, dtype=torch.int64)    # the peak is that of 3 micro-batches
            accumulate(model, tokens, tokens, micro_batch=rows)
            optimizer.step()

        find_micro_batch(step, 64, 8 * 2**30, model, optimizer).micro_batch

    The sizes 1…`effective_batch` are searched by doubling and halving, in about 3·log₂(`effective_batch`) runs.
    `equal`: try only divisors of the effective batch, so that all micro-batches have one shape.

    Each run is a dry run (`memory.dry_run`): it takes no memory, and `args` (models, optimizers, tensors) stay as they
    are. Its peak counts all tensors, including those of `args`. It does not count workspaces of kernels or the
    allocator's rounding, so leave some room.

    With `probe` the step really runs on `device` (default: CUDA if there is one), once for each size tried, and so
    trains the model in `args`. After a size runs out of memory, the tensors of its frames and the allocator's cache are
    freed. Peaks are then the allocator's: on CUDA all bytes that it reserved, on a CPU the bytes above the start. On
    CUDA the budget may be None, which means the whole device. The random number generators are restored.

    Raises ValueError if no size fits (the message names the smallest need), for an `effective_batch` that is not an
    integer above 0, for a `budget` that is not a number above 0, and for a probe of a CPU without a budget, since a CPU
    process that runs out of memory is killed. Raises TypeError for a `step` that is not callable. Any other exception
    in the step is passed on.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    _check(step, effective_batch, budget, probe, device)
    sizes = [rows for rows in range(1, effective_batch + 1) if not equal or effective_batch % rows == 0]
    tried = {}
    with tqdm(desc="micro-batches", delay=2) as progress, torch.random.fork_rng(
            [device] if probe and device.type == "cuda" else []):

        def fits(index):
            rows = sizes[index]
            if rows not in tried:
                tried[rows] = _probe(step, rows, args, device) if probe else _dry(step, rows, args)
                progress.update()
            return tried[rows] is not None and (budget is None or tried[rows] <= budget)

        best = _largest(sizes, fits, None if probe else tried)
    if probe:
        _empty(device)
    if best is None:
        raise ValueError(_nothing_fits(tried, budget, device))
    rows = sizes[best]
    return MicroBatch(rows, math.ceil(effective_batch / rows), effective_batch, tried[rows], budget, tried)


def _largest(sizes, fits, peaks):
    """Return the index of the largest of `sizes` that fits, or None if none does. Doubles, then bisects.

    Up to half of the batch, peaks rise with the rows. Beyond that there are two micro-batches, and the second, which
    runs on top of the first one's gradients, has the remaining rows. So the peak falls while the second decides it, and
    rises again once the first does. This valley is searched by its slope, after the whole batch was tried. That needs
    `peaks` (rows → bytes of the sizes tried so far), which a probe does not have for sizes that ran out of memory.
    """
    last = len(sizes) - 1  # in one piece no gradients lie beside activations: it may fit where halves do not
    if peaks is not None and fits(last):
        return last
    low, high, stride = (0, len(sizes), 1) if fits(0) else (None, 0, 0)
    while high - (low or 0) > stride > 0:
        low, high = (low + stride, high) if fits(low + stride) else (low, low + stride)
        stride *= 2
    if low is not None:
        low = _rising(low, high, fits)
    if peaks is not None:
        half = bisect_right(sizes, sizes[-1] // 2)
        inside = _valley(max(half, 0 if low is None else low + 1), last, sizes, fits, peaks)
        low = low if inside is None else _rising(inside, last, fits)
    return low


def _rising(low, high, fits):
    """Return the largest index that fits, by bisection from `low`, which fits, to `high`, which does not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _valley(low, high, sizes, fits, peaks):
    """Return an index in [low, high) that fits, where peaks fall and then rise; None if there is none."""
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            return middle
        falling = middle + 1 < high and (fits(middle + 1) or peaks[sizes[middle + 1]] <= peaks[sizes[middle]])
        low, high = (middle + 1, high) if falling else (low, middle)
    return None


def _dry(step, rows, args):
    from ..memory import dry_run

    return dry_run(step, rows, *args).peak.total


def _probe(step, rows, args, device):
    """Return the peak of a real run, or None if it ran out of memory; everything it allocated is then freed."""
    from ..memory import measure

    _empty(device)  # else memory cached by an earlier run would count as reserved
    reading = measure(device)
    try:
        with reading:
            step(rows, *args)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _forget(error)  # else its frames keep the tensors of the run that failed
        reading = None
    if reading is None:
        return None
    return reading.peak if reading.reserved is None else reading.reserved


OUT_OF_MEMORY = ("CUBLAS_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: can't allocate memory",
                 "DefaultCPUAllocator: not enough memory")  # messages of plain RuntimeErrors


def is_out_of_memory(error):
    """Tell whether an exception says that a device, or the CPU's allocator, has no memory left."""
    named = isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    return named or isinstance(error, torch.OutOfMemoryError)


def _forget(error):
    """Drop the tracebacks of `error` and its causes: they hold frames, whose local variables hold tensors."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _empty(device):
    """Free unused memory: reference cycles first, then the allocator's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _nothing_fits(tried, budget, device):
    """Return the message for when no size fits. It names the smallest need, if any size ran to its end."""
    advice = "shorter sequences, recomputed activations or a smaller model would take less"
    needs = {rows: nbytes for rows, nbytes in tried.items() if nbytes is not None}
    if not needs:
        return f"{device} runs out of memory with a micro-batch of 1 row: {advice}"
    rows = min(needs, key=needs.get)
    return (f"no micro-batch fits: the least, of {rows} row{'s' * (rows > 1)}, needs {needs[rows]:,} bytes, "
            f"{human(needs[rows])}, and the budget is {budget:,}; {advice}")


def _check(step, effective_batch, budget, probe, device):
    if not callable(step):
        raise TypeError(f"step={step!r}: expected a function, called as step(rows, *args)")
    if isinstance(effective_batch, bool) or not isinstance(effective_batch, Integral) or effective_batch < 1:
        raise ValueError(f"effective_batch={effective_batch!r}: expected an integer of at least 1, the rows of a step")
    if budget is None and probe and device.type == "cuda":
        return
    if budget is None and probe:
        raise ValueError("budget=None: on a CPU the operating system kills a process that runs out of memory, so no "
                         "error can be caught. Give the bytes that a step may take")
    if isinstance(budget, bool) or not isinstance(budget, Real) or not 0 < budget < math.inf:
        raise ValueError(f"budget={budget!r}: expected bytes, a number above 0" + (
            "" if budget is not None else " (None, all that a GPU has, is for probe=True)"))
