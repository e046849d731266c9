"""A budget of memory: measure what runs in a context, and fail with the ledger of the moment if it takes more."""

import argparse
from contextlib import ExitStack

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.weak import WeakIdKeyDictionary

from ..common.ledger import human
from ..memory.peaks import Peaks
from ..memory.tracker import Tracker
from ..untrusted.text import one_line, shown, size


class OverBudget(AssertionError):
    """More was taken than the budget has: when, by how much, and by whom."""


class Budget:
    """A context that measures. At its end it raises OverBudget if `peak` is above `limit`, unless it raises already.

    `limit`: bytes, or a text as "70 GiB". `per="step"`: each optimizer step counts, from the first forward of a module
    on, and not what comes after the last one; without any, all from that forward on is one step. `per="test"`: all
    counts. Bytes are absolute: on CUDA those that PyTorch's allocator gave, on the device with most, while a tracker
    says who held them; else those of the CPU's tensors that a tracker sees. CUDA is read where the process uses it, but
    not if each tensor seen is on the CPU: there all would fit unread.
    """

    def __init__(self, limit: int | str, per: str = "step") -> None:
        try:
            self.limit, self.per, self.peak, self._watch, self._open = size(str(limit)), per, 0, None, ExitStack()
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"memory budget: {error}") from None
        if per not in ("step", "test"):
            raise ValueError(f"memory budget with per={shown(per)}: expected 'step' or 'test'")

    def begin(self, peaks: Peaks | None = None) -> "Budget":
        """Begin to measure. `peaks`: readings that outlive it. RuntimeError inside another budget or dispatch mode."""
        for mode in _get_current_dispatch_mode_stack():
            name = "another memory budget" if isinstance(mode, _Watch) else f"{type(mode).__name__}, a dispatch mode"
            raise RuntimeError(f"a memory budget of {self.limit:,} bytes begins within {name}: end that one first")
        self._watch = self._open.enter_context(_Watch(peaks or self._open.enter_context(Peaks())))
        return self

    def end(self) -> OverBudget | None:
        """Stop measuring. Returns what there is to raise; None if the budget is kept, or has ended before."""
        watch, self._watch = self._watch, None
        if watch is None:
            return None
        with self._open:
            watch.part("what no step ended" if watch.stepped else "one step, since no optimizer stepped")
        on_cuda, watch._device = torch.cuda.is_initialized() and watch.devices != ["cpu"], "cpu"
        totals = None if on_cuda else watch.timeline.totals
        parts = [p if on_cuda else p | {"taken": int(totals[p["rows"]].max(initial=0))} for p in watch.parts[1:]]
        steps = [part for part in parts if part["is_step"]]
        part = max(parts if self.per == "test" else steps or parts[-1:], key=lambda part: part["taken"])
        self.peak, over, rows = part["taken"], part["taken"] - self.limit, part["rows"]
        if over <= 0:
            return None
        watch._device = f"cuda:{part['device']}" if on_cuda else "cpu"
        row = max(range(rows.start, max(rows.start + 1, rows.stop)), key=watch.timeline.totals.__getitem__)
        moment = watch.timeline[row]
        watch.peak_moment = lambda phase: moment  # of this part: who held its bytes is read there
        where = "the whole test, highest in " * (self.per == "test") + part["name"]
        lines = [line for by in ("line", "module") for line in (f"by {by}:", *(
            f"{nbytes:>16,}  {one_line(name)}" for name, nbytes in watch.top(by=by)))]
        return OverBudget("\n".join([
            f"{where}: {self.peak:,} bytes on {watch.device}, {over:,} ({human(over)}) more than {self.limit:,}",
            one_line(f"after {moment.operation} in {moment.module or 'no module'}, {moment.phase}"
                     f"{'; of what the allocator gave, without workspaces' * on_cuda}:"), repr(moment.ledger), *lines]))

    def __enter__(self) -> "Budget":
        return self if self._watch else self.begin()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if (over := self.end()) is not None and kind is None:
            raise over


class _Watch(Tracker):
    """A tracker that parts what it sees: what was before, building, each optimizer step, what no step ended."""

    def __init__(self, peaks):
        super().__init__()
        self.parts, self.stepped, self._peaks, self._steps = [], False, peaks, WeakIdKeyDictionary()
        self.part("before")

    def enter_module(self, module):
        if len(self.parts) == 1:
            self.part("building")
        super().enter_module(module)

    def leave_step(self, optimizer):
        super().leave_step(optimizer)
        self.stepped, self._steps[optimizer] = True, self._steps.get(optimizer, 0) + 1
        self.part(f"optimizer step {self._steps[optimizer]} ({type(optimizer).__name__})", is_step=True)

    def part(self, name, is_step=False):
        count = torch.cuda.is_initialized() and torch.cuda.device_count()
        found = [self._peaks.since_the_last([i]) for i in range(count)]
        taken, device = max(((each["allocated"], each["device"]) for each in found), default=(0, 0))
        rows = slice(self.parts[-1]["rows"].stop if self.parts else 0, len(self.ops) + 1)
        self.parts.append({"name": name, "rows": rows, "taken": taken, "device": device, "is_step": is_step})
