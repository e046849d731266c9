"""Replay a trace on an allocator: what is reserved meanwhile, and why a request fails.

    reserved = requested + internal + external

Internal fragmentation is what blocks have beyond what was asked for (rounding, rests too small to be cut off); external
is what is free between them, in segments. A request fails although enough is free if no hole is large enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..common.allocations import ALLOC, AllocationTrace
from ..untrusted.text import one_line
from .caching import CachingAllocator
from .device import OutOfMemory
from .settings import MIB, Settings

CURES = ("expandable_segments:True", "max_split_size_mb:32", "max_split_size_mb:128", "max_split_size_mb:512",
         "roundup_power2_divisions:8", "garbage_collection_threshold:0.8")  # settings that `explain` tries


@dataclass
class Replay:
    """What a replay read. Bytes after each event, int64 arrays (N,): `reserved`, `allocated`, `requested`.

    `failure`: a FailedRequest if a request failed; the arrays end before it. `allocator`: as it is at the end.
    """

    trace: object
    allocator: object
    reserved: np.ndarray
    allocated: np.ndarray
    requested: np.ndarray
    failure: object = None
    live: dict = field(default_factory=dict, repr=False)  # number in the trace → Block

    @property
    def peak(self):
        """Return the most bytes that were reserved."""
        return int(self.reserved.max(initial=0))

    @property
    def internal(self):
        """Return internal fragmentation after each event, in bytes."""
        return self.allocated - self.requested

    @property
    def external(self):
        """Return external fragmentation after each event, in bytes."""
        return self.reserved - self.allocated

    def __repr__(self):
        at = int(self.reserved.argmax()) if len(self.reserved) else 0
        text = (f"{len(self.reserved):,} events: at most {self.peak:,} bytes reserved"
                + (f", {int(self.requested[at]):,} of these requested, {int(self.internal[at]):,} lost in blocks and "
                   f"{int(self.external[at]):,} between them" if len(self.reserved) else ""))
        return text if self.failure is None else f"{text}\n{self.failure}"


@dataclass
class FailedRequest:
    """A request that failed: `event` in the trace, `nbytes` asked for, `size` as rounded, and what was there.

    - `free`: bytes of segments that were free; `largest`: the bytes of the largest hole that this request might have.
    - `neighbours`: (name, category, bytes) of the live blocks at both sides of that hole.
    - `cures`: {settings: True if a replay with them goes on past this event}, once `explain` has tried.
    """

    event: int
    nbytes: int
    size: int
    reserved: int
    limit: int
    free: int
    largest: int
    neighbours: list
    cures: dict = field(default_factory=dict)

    def __str__(self):
        lines = [f"event {self.event} asks for {self.nbytes:,} bytes and gets none: {self.reserved:,} of "
                 f"{self.limit:,} bytes are reserved, {self.free:,} of these free, the largest hole has "
                 f"{self.largest:,}"]
        for name, category, nbytes in self.neighbours:
            lines.append(f"  beside it: {nbytes:,} bytes of {one_line(category) or 'no category'}, "
                         f"{one_line(name) or 'unknown'}")
        for settings, helps in self.cures.items():
            lines.append(f"  {settings}: {'goes on' if helps else 'fails, too'}")
        return "\n".join(lines)


def replay(trace: AllocationTrace, allocator: Any = None, *, capacity: int | None = None, settings: Any = None,
           until: int | None = None) -> Any:
    """Run an AllocationTrace on `allocator`, by default a CachingAllocator of `capacity` bytes and these `settings`.

    It ends at the first request that fails, or before event `until`. TypeError for what is no AllocationTrace;
    ValueError for a capacity below the largest single request.
    """
    if not isinstance(trace, AllocationTrace):
        raise TypeError(f"trace is a {type(trace).__name__}: expected an AllocationTrace: AllocationTrace.of(…) of "
                        "what memory.track or memory.dry_run returned, or trace_of(Snapshot.load(path))")
    allocator = CachingAllocator(capacity, settings) if allocator is None else allocator
    _check_capacity(trace, allocator)
    nbytes, N = trace.blocks["nbytes"].tolist(), len(trace) if until is None else until
    read, live, failure = np.zeros((3, N), dtype=np.int64), {}, None
    for i, (action, block, stream, _) in enumerate(trace.events[:N].tolist()):
        if action == ALLOC:
            try:
                live[block] = allocator.allocate(nbytes[block], stream)
            except OutOfMemory as error:
                failure, N = _failure(trace, allocator, live, i, nbytes[block], error.size, stream), i
                break
        else:
            allocator.free(live.pop(block))
        read[:, i] = allocator.reserved, allocator.allocated, allocator.requested
    return Replay(trace, allocator, *read[:, :N], failure, live)


def explain(trace: AllocationTrace, *, capacity: int, settings: Any = None, cures: Sequence[str] = CURES) -> Any:
    """Replay a trace, and if a request fails, once more with each of `cures` added to the settings: the Replay, its
    failure with what each of them did."""
    found = replay(trace, capacity=capacity, settings=settings)
    if found.failure is not None:
        base = settings if isinstance(settings, Settings) else Settings.parse(settings or "")
        for cure in cures:
            name, value = next(iter(vars(Settings.parse(cure)).items() - vars(Settings()).items()))
            if getattr(base, name) != getattr(Settings(), name):  # set already: trying it again says nothing
                continue
            below = {"memory_fraction": 1 - 2**-40} if cure.startswith("garbage") else {}  # collects with one below 1
            again = replay(trace, capacity=capacity, settings=replace(base, **{name: value}, **below),
                           until=found.failure.event + 1)  # far enough: does this request pass?
            found.failure.cures[cure] = again.failure is None
    return found


def _check_capacity(trace, allocator):
    largest = max(map(allocator.rounded, {0, *trace.blocks["nbytes"].tolist()}))
    if largest > allocator.limit:
        raise ValueError(f"capacity {allocator.limit:,} bytes: expected at least {largest:,}, the largest request, or "
                         f"{-(-largest // (2 * MIB)) * 2} MiB")


def _failure(trace, allocator, live, event, nbytes, size, stream):
    free, largest, beside = allocator.why(size, stream)
    names = {block.address: number for number, block in live.items()}
    neighbours = [(trace.name_of(names[block.address]), trace.category_of(names[block.address]), block.requested)
                  for block in beside if block.address in names]
    return FailedRequest(event, nbytes, size, allocator.reserved, allocator.limit, free, largest, neighbours)
