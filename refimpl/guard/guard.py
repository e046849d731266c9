"""A recorder that stays on in a real run: `with memory.guard("oom/"): train()`.

    each step      one line in the log: what is known by name, the peaks of its phases, the batch
    meanwhile      at most a sentence a minute: what grows, fragments, or would not fit
    at a failure   a report on the disk before the error goes on

No operation is watched, but for three steps under the tracker when something grows, or 90 % of the memory was reached.
"""

import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
import torch

from ..common.nested_tensors import tensors_in
from ..explain.no_gradients import Recomputed
from ..explain.phases import START
from ..untrusted.text import print_text
from . import failure, report
from .known_bytes import Rarely
from .loop import Loop
from .meters import CUDAMeter, ProcessMeter, limit_cuda
from .sayings import Sayings
from .step_log import StepLog

if TYPE_CHECKING:
    from os import PathLike

EVENTS = 100_000  # of the allocator's history
REPORTS = 10  # of failures that the program catches: later ones are counted in the log

_open = []  # the guard of this process


class Guard:
    """Records a run, says what goes wrong in it, and reports each request for memory that fails: a context.

    - `folder`: of `rankN.steps.jsonl`, a line a step, and of `rankN.failureK.*`; one for all ranks. `refimpl oom`
      reads it.
    - `limit`: bytes that the process may take: the request that would pass them fails. On a GPU PyTorch's allocator
      holds to it; on a CPU the system does, on Linux, counting all that the process takes.
    - `stacks`: "oom" keeps the allocator's last 100,000 events on a GPU, each with the program's line; None keeps none.

    Afterwards, and meanwhile: `step`, `said` (sentences), `failures` (paths of reports), `last` (the last step's line
    of the log). Raises OSError where the folder cannot be written, ValueError for a limit or `stacks` that is none,
    RuntimeError if another guard is open. The program's errors go on as they are, with a note.
    """

    def __init__(self, folder: "str | PathLike[str]", limit: int | None = None, stacks: str | None = "oom") -> None:
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise ValueError(f"limit={limit!r}: expected bytes, 1 or more, or None")
        if stacks not in ("oom", None):
            raise ValueError(f"stacks={stacks!r}: expected \"oom\" or None")
        self.folder, self.limit, self._stacks = Path(folder), limit, stacks
        self.step, self.said, self.failures, self.last = 0, [], [], {}
        self._log, self._by_backward = None, False
        self._failed, self._noted, self._is_told = 0, 0, False

    def __enter__(self) -> Self:
        if _open:
            raise RuntimeError(f"a guard is open already, in {_open[0].folder}: one watches the whole process")
        self.open_log()
        self._context = ExitStack()
        _open.append(self)
        self._context.callback(_open.remove, self)
        self._meter = ProcessMeter(self.limit if not _has_cuda() else None)
        if self.limit and _has_cuda():
            self._context.callback(limit_cuda(self.limit))
        self._begin_cuda()
        self._phases, self._batch, self._calls, self._began = {}, None, 0, time.perf_counter()
        self._known, self._holes = Rarely(0.01), Rarely(0.005)
        self._known_now, self._largest_free, self._reserved = None, 0, 0
        self._recomputed = self._context.enter_context(Recomputed())
        self._loop = self._context.enter_context(Loop(self))
        self._sayings = Sayings(self.folder, self._loop, self._tell, self._write)
        self._meter.since_the_last()
        if self.limit and not _has_cuda() and not self._meter.holds:
            self._sayings.say("limit", "this system does not hold a process to a limit: it is only compared with")
        return self

    def open_log(self) -> None:
        """Begin the log, as entering the context does. OSError where the folder cannot be written."""
        if self._log is None:
            self.rank, self.world = _rank_and_world()
            try:
                self._log = StepLog(self.folder, self.rank, self.world)
            except OSError as error:
                raise OSError(f"a guard cannot write into {self.folder}: {error}") from error

    def __exit__(self, kind, error, traceback):
        if error is not None:
            self.failed(error)
        if self._sayings.tracing:
            self._sayings.tracing.close()
        self._context.close()
        self._meter.close()
        if not self.step and error is None and self._loop.phase != START:
            self._tell("a model ran, and no step ended in this process: no optimizer stepped, and no backward ended")
        if self._by_backward:
            self._tell("no optimizer of torch.optim was in sight: each backward was counted as a step")
        self._log.close("by itself" if error is None else f"by {kind.__name__}")

    # --- CUDA --------------------------------------------------------------------------------------------------------

    def _begin_cuda(self):
        """Have the allocator record, and tell of what fails, as soon as CUDA begins."""
        _observe()
        if self._stacks == "oom" and _has_cuda():
            torch.cuda._lazy_call(self._record)

    def _record(self):
        if self in _open and not _is_recording():
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=EVENTS)
            self._context.callback(torch.cuda.memory._record_memory_history, enabled=None)

    def _meter_of_cuda(self, device=-1):
        """Read the GPU in place of the process, once the program uses it, or a request on `device` has failed."""
        if self._meter.name == "cpu" and torch.cuda.is_initialized() and (device >= 0 or torch.cuda.memory_reserved()):
            self._meter.close()
            self._meter = CUDAMeter(self.limit)
        if device >= 0:
            self._meter.device = device

    # --- what the loop tells -----------------------------------------------------------------------------------------

    def enters(self, phase: str) -> None:
        """Note that a phase begins: what was taken since the last one was the last one's."""
        self._meter_of_cuda()
        found = self._meter.since_the_last()
        self._phases[self._loop.phase] = max(self._phases.get(self._loop.phase, 0), found["peak"])
        self._reserved = max(self._reserved, found.get("reserved", 0))
        self._now = found["now"]

    def batch(self, args: Any, kwargs: Any) -> None:
        """Note what a model that trains is called on: of several calls the one with most numbers."""
        self._calls += 1
        for tensor in (*tensors_in(args), *tensors_in(kwargs)):
            if tensor.ndim and (self._batch is None or tensor.numel() > self._batch[0]):
                self._batch = tensor.numel(), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def stepped(self, optimizer: Any) -> None:
        """Note that a step has ended: write its line, and say what is worth it."""
        self.enters(self._loop.phase)
        self.step += 1
        self._write(self._line())
        self._by_backward |= optimizer is None
        self._sayings.stepped(optimizer, self.step)
        self._sayings.look(self.last, self._meter, self._batch and self._batch[1])
        self._phases, self._batch, self._calls, self._reserved = {}, None, 0, 0
        self._began = time.perf_counter()
        self._meter.since_the_last()  # what we took ourselves is nobody's

    def _line(self):
        if self._known_now is None or self._known.due():
            with self._known:
                self._known_now = dict(self._loop.known.read(self._meter.device))
                self._known_at = self.step
        known = self._known_now
        peak = max(self._phases.values())
        line = {"step": self.step, "seconds": round(time.perf_counter() - self._began, 6),
                "batch": self._batch and {"shape": list(self._batch[1]), "dtype": self._batch[2], "calls": self._calls},
                "peak": peak, "known": known, "known at": self._known_at, "rest": peak - sum(known.values()),
                "phases": self._phases, "now": self._now}
        if self._meter.name == "cuda":
            if self._holes.due():
                with self._holes:
                    self._largest_free = self._meter.largest_free()
            line |= {"reserved": self._reserved, "largest free": self._largest_free,
                     "resident": psutil.Process().memory_info().rss}
        if self._sayings.tracing:
            line["traced"] = True
        self.last = line
        return line

    def _tell(self, words):
        self.said.append(words)
        self._write({"said": words})
        print_text(f"refimpl guard, rank {self.rank}: {words}", file=sys.stderr, flush=True)

    def _write(self, found):
        self._log.write(found)
        if self._log.why_not and not self._is_told:
            self._is_told = True
            print_text(f"refimpl guard: the log cannot be written: {self._log.why_not}", file=sys.stderr)

    # --- failures ----------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException | None, device: int = -1, request: int = 0) -> None:
        """Report an error that says that memory is not enough; `error` is None where PyTorch's allocator tells of it,
        before there is one. Another error is left alone, and none is raised here."""
        if error is not None and (not failure.is_of_memory(error, self._free) or any(
                "refimpl guard" in note for note in getattr(error, "__notes__", ()))):
            return
        if error is None or self._noted == self._failed:  # else the allocator has told of it
            try:
                with self._meter.lifted():
                    self._report(error, request, device)
            except Exception as problem:  # the program's own error is to go on, whatever is wrong with the report
                print_text(f"refimpl guard: the report of a failure could not be made: {problem!r}", file=sys.stderr)
                self._write(self._failure() | {"not reported": repr(problem)})
        if error is not None:
            self._note(error)
            self._phases, self._batch, self._calls = {}, None, 0  # the program may try again, with a smaller batch

    def _free(self):
        return self._meter.state()["free"]

    def _note(self, error):
        self._noted = self._failed
        error.add_note(f"refimpl guard: {self._why}; {self._where}")

    def _failure(self):
        return {"failed": self._failed, "step": self.step + 1, "at": time.time()}

    def _report(self, error, request, device):
        self._failed += 1
        self._meter_of_cuda(device)
        self._why, self._where = "memory is not enough", "no report could be written"
        if self._failed > REPORTS:
            self._where = f"no report is written after {REPORTS}"
            self._write(self._failure() | {"not reported": self._where})
            return
        self.enters(self._loop.phase)
        line, running = failure.asked_in(error)
        facts = failure.Facts(self.rank, self.world, self.step + 1, self._loop.phase, self._loop.known,
                              request or (failure.bytes_of(error) if error else 0), line, running,
                              "CUDA out of memory" if error is None else (str(error) or repr(error)).splitlines()[0])
        facts.batch = self._batch and self._batch[1]
        facts.before, facts.growth = self._sayings.longest, self._sayings.growth
        facts.traced = self._sayings.traced
        facts.phases, facts.recomputed_without = dict(self._phases), self._recomputed.without
        self._loop.known.find()
        stem = self.folder / f"{self._log.name}.failure{self._failed}"
        snapshot = torch.cuda.memory._snapshot() if self._meter.name == "cuda" else None
        failure.fill(facts, self._meter, snapshot)
        if snapshot and self._stacks:
            failure.replayed(facts, snapshot, f"{stem}.pickle")
        said = report.as_dict(facts)
        self._why = said["causes"][0]["what"]
        self._where = report.write(said, stem)
        self.failures.append(self._where)
        self._write(self._failure() | {"why": self._why})


def _rank_and_world():
    if "RANK" in os.environ:
        return int(os.environ["RANK"]), int(os.environ.get("WORLD_SIZE", 1))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def _has_cuda():
    return torch.backends.cuda.is_built() and torch.cuda.device_count() > 0


def _is_recording():
    return getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)()


_observed = []


def _observe():
    """Have PyTorch's allocator tell whichever guard is open of each request that fails: it cannot be told to stop."""
    if not _observed and _has_cuda():
        _observed.append(True)
        torch.cuda._lazy_call(lambda: torch._C._cuda_attach_out_of_memory_observer(
            lambda device, nbytes, total, free: _open and _open[0].failed(None, device, nbytes)))
