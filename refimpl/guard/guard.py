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

import torch

from ..common.ledger import human
from ..common.nested_tensors import tensors_in
from ..explain.explanation import Explanation
from ..explain.no_gradients import Recomputed
from ..explain.script import Ending
from ..explain.script_run import Run
from ..untrusted.text import print_text
from . import failure, report
from .growth import Series
from .known_bytes import Rarely
from .longest_batch import NEAR, LongestBatch
from .loop import Loop
from .meters import CUDAMeter, ProcessMeter, limit_cuda
from .step_log import StepLog
from .traced_steps import STEPS, TracedSteps

if TYPE_CHECKING:
    from os import PathLike

EVERY = 60  # seconds between two sentences
NEARLY = 0.9  # of the capacity: then steps run under the tracker, once
FRAGMENTED = 1.5  # times as much reserved as allocated
EVENTS = 100_000  # of the allocator's history
REPORTS = 10  # of failures that the program catches: later ones are counted in the log
LEAST = {"cpu": 2**20, "cuda": 2**12}  # bytes of a window of steps: what a process takes wavers

_open = []  # the guard of this process


def guard(folder: "str | PathLike[str]", limit: int | None = None, stacks: str | None = "oom") -> "Guard":
    """Return a Guard that writes into `folder`; see there."""
    return Guard(folder, limit, stacks)


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
        self.every, self._log = EVERY, None
        self._traced = self._tracing = self._growth = None
        self._failed, self._noted, self._is_told = 0, 0, False

    def __enter__(self) -> Self:
        if _open:
            raise RuntimeError(f"a guard is open already, in {_open[0].folder}: one watches the whole process")
        self.open_log()
        self._context = ExitStack()
        _open.append(self)
        self._context.callback(_open.remove, self)
        self._meter, self._limit_now = ProcessMeter(self.limit if not _has_cuda() else None), None
        if self.limit and _has_cuda():
            self._context.callback(limit_cuda(self.limit))
        self._begin_cuda()
        self._phases, self._batch, self._calls, self._began = {}, None, 0, time.perf_counter()
        self._series, self._longest = Series(LEAST[self._meter.name]), LongestBatch()
        self._known, self._holes, self._last_said = Rarely(0.01), Rarely(0.005), -float("inf")
        self._known_now, self._largest_free, self._was_near = None, 0, False
        self._waiting, self._reserved = {}, 0
        self._recomputed = self._context.enter_context(Recomputed())
        self._loop = self._context.enter_context(Loop(self))
        self._meter.since_the_last()
        if self.limit and not self._meter.holds:
            self._say("limit", "this system does not hold a process to a limit: it is only compared with")
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
        if self._tracing:
            self._tracing.close()
        self._context.close()
        self._meter.close()
        if not self.step:
            self._write({"said": "no optimizer of torch.optim made a step, and no backward ended, in this process"})
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

    def _meter_of_cuda(self):
        """Read the GPU in place of the process, once the program uses it."""
        if self._meter.name == "cpu" and torch.cuda.is_initialized() and torch.cuda.memory_reserved():
            self._meter.close()
            self._meter = CUDAMeter(self.limit)
            self._series = Series(LEAST["cuda"])

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
        if self._tracing and optimizer is not None:
            self._go_on_tracing(optimizer)
        self._write(self._line())
        self._look()
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
                "batch": self._batch and {"shape": self._batch[1], "dtype": self._batch[2], "calls": self._calls},
                "peak": peak, "known": known, "known at": self._known_at, "rest": peak - sum(known.values()),
                "phases": self._phases, "now": self._now}
        if self._meter.name == "cuda":
            if self._holes.due():
                with self._holes:
                    self._largest_free = self._meter.largest_free()
            line |= {"reserved": self._reserved, "largest free": self._largest_free,
                     "resident": self._resident()}
        if self._tracing:
            line["traced"] = True
        self.last = line
        return line

    def _resident(self):
        import psutil

        return psutil.Process().memory_info().rss

    # --- what is said ------------------------------------------------------------------------------------------------

    def _look(self):
        """Look at the step that has ended: does something grow, fragment, or come near the end?"""
        peak, capacity = self.last["peak"], self._meter.capacity
        if self._batch:
            is_longest = self._longest.add(self._batch[1], self.last["rest"])
            if is_longest and peak > NEAR * capacity:
                self._say_longest(peak, capacity)
        if self._reserved > FRAGMENTED * peak and self._reserved > NEAR * capacity:
            self._say("fragmentation", f"reserved {self._reserved / peak:.1f} times allocated: fragmentation, see "
                      "PYTORCH_ALLOC_CONF=expandable_segments:True")
        if self._tracing:
            return
        found = self._series.add(self.step, self._now)
        if found:
            self._growth = found
        is_near = peak > NEARLY * capacity and not self._was_near
        self._was_near |= is_near
        if (found or (is_near and not self._traced)) and self._loop.known.optimizers:
            self._trace()
        elif found:
            self._say("growth", f"grows by {human(found[0])} a step since step {found[1]}")
        self._say_waiting()

    def _say_longest(self, peak, capacity):
        shape = self._batch[1]
        known = peak - self.last["rest"]
        length = self._longest.would_not_fit(shape, capacity - known)
        self._say("longest", f"step {self.step} had the longest batch so far ({self._longest.longest:,}): "
                  f"{human(peak)} of {human(capacity)}" + (f"; at {length:,} it would not fit" if length else ""))

    def _say(self, kind, words):
        """Say a sentence, at most one a minute: of those that wait, the newest of each kind."""
        self._waiting[kind] = words
        self._say_waiting()

    def _say_waiting(self):
        now = time.monotonic()
        if self._waiting and now - self._last_said >= self.every:
            words = self._waiting.pop(next(iter(self._waiting)))
            self._last_said = now
            self.said.append(words)
            self._write({"said": words})
            print_text(f"refimpl guard, rank {self.rank}: {words}", file=sys.stderr, flush=True)

    def _write(self, found):
        self._log.write(found)
        if self._log.why_not and not self._is_told:
            self._is_told = True
            print_text(f"refimpl guard: the log cannot be written: {self._log.why_not}", file=sys.stderr)

    # --- steps under the tracker -------------------------------------------------------------------------------------

    def _trace(self):
        """Run the next steps under the tracker."""
        tracing = TracedSteps(self.step)
        if why := tracing.begin():
            self._write({"said": f"no step ran under the tracker: {why}"})
            return
        self._tracing = tracing
        self._unwatch = self._loop.watch_engine()

    def _go_on_tracing(self, optimizer):
        if not self._tracing.stepped(optimizer):
            return
        tracing, self._tracing = self._tracing, None
        recorder = tracing.recorder
        run = Run(str(self.folder), recorder.recording(), Ending("steps"), STEPS, STEPS, {}, True, 0, None, True)
        found = Explanation(run).as_dict()
        self._traced = found | {"of steps": f"{tracing.begun + 1} to {self.step}"}
        grows = found.get("grows") or []
        self._write({"traced": self._traced["of steps"], "grows": grows, "top": found.get("top")})
        if self._growth:
            rate, since = self._growth
            for each in grows:
                lines = " and ".join(line.partition(": ")[0] for line in each["lines"])
                self._say("growth", f"grows by {human(each['bytes'])} a step since step {since} (steps "
                          f"{self._traced['of steps']} ran under the tracker): made at {lines}, held by "
                          f"{each['holder']}")

    # --- failures ----------------------------------------------------------------------------------------------------

    def failed(self, error: BaseException | None, device: int = -1, request: int = 0) -> None:
        """Report an error that says that memory is not enough; `error` is None where PyTorch's allocator tells of it,
        before there is one. Another error is left alone, and none is raised here."""
        if error is not None and (not failure.is_of_memory(error) or any(
                "refimpl guard" in note for note in getattr(error, "__notes__", ()))):
            return
        if error is None or self._noted == self._failed:  # else the allocator has told of it
            try:
                with self._meter.lifted():
                    self._report(error, request)
            except Exception as problem:  # the program's own error is to go on, whatever is wrong with the report
                print_text(f"refimpl guard: the report of a failure could not be made: {problem!r}", file=sys.stderr)
                self._write(self._failure() | {"not reported": repr(problem)})
        if error is not None:
            self._note(error)
            self._phases, self._batch, self._calls = {}, None, 0  # the program may try again, with a smaller batch

    def _note(self, error):
        self._noted = self._failed
        error.add_note(f"refimpl guard: {self._why}; {self._where}")

    def _failure(self):
        return {"failed": self._failed, "step": self.step + 1, "at": time.time()}

    def _report(self, error, request):
        self._failed += 1
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
        facts.longest_before, facts.growth, facts.traced = self._longest.longest, self._growth, self._traced
        facts.grows = (self._traced or {}).get("grows") or []
        facts.since = self._growth[1] if self._growth else self.step
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
