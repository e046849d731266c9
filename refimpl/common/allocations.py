"""Traces of an allocator: which bytes were asked for and freed, in order.

    AllocationTrace.of(memory.track(…) or dry_run(…))       what a step asks for, from our tracker, on any device
    snapshot.load("snapshot.pickle")                        what PyTorch's allocator recorded on CUDA
    trace.save(path); AllocationTrace.load(path)            a compact file

An event takes or frees a block. Blocks are numbered in the order in which they were taken.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from os import PathLike

    import torch

ALLOC, FREE = 1, -1
EVENT = np.dtype([("action", "i1"), ("block", "i8"), ("stream", "i8"), ("time_ns", "i8")])
BLOCK = np.dtype([("nbytes", "i8"), ("category", "i4"), ("name", "i4")])


class DamagedTrace(ValueError):
    """Raised if a trace frees what it never took, or takes a block twice."""


@dataclass
class AllocationTrace:
    """A sequence of allocations and frees.

    - `events`: a structured array (N,) of EVENT: ALLOC or FREE, the block's number, its stream, ns since 1970.
    - `blocks`: a structured array (B,) of BLOCK: bytes that were asked for, and numbers of its category and name in
      `categories` and `names`.

    DamagedTrace, with the event's number, if an event frees a block that is not live, or takes one again.
    """

    events: np.ndarray
    blocks: np.ndarray
    categories: list = field(default_factory=lambda: [""])
    names: list = field(default_factory=lambda: [""])

    def __post_init__(self):
        live, B = set(), len(self.blocks)
        for i, (action, block) in enumerate(zip(self.events["action"].tolist(), self.events["block"].tolist(),
                                                strict=True)):
            if not 0 <= block < B:
                raise DamagedTrace(f"event {i}: block {block} of {B}")
            if action == ALLOC:
                if block in live:
                    raise DamagedTrace(f"event {i} takes block {block}, which is live")
                live.add(block)
            elif block in live:
                live.discard(block)
            else:
                raise DamagedTrace(f"event {i} frees block {block}, which is not live: it was never taken, or was "
                                   "freed before")

    @classmethod
    def of(cls, trace: Any, device: "torch.device | str | None" = None) -> Self:
        """Read the recording of a tracker or a dry run (`memory.Trace`), on `device`, by default the one it reads.

        Storages that were there before come first. One that is resized is freed, and taken anew.
        """
        found, categories, block_of = Maker(), trace.categories(), {}
        for time, i, nbytes in trace.lives(device):
            if nbytes < 0:
                found.free(block_of.pop(i), time)  # a negative number: its bytes are given back
            else:
                record = trace.records[i]
                where = f"{record.op} in {record.module}" if record.module else record.op
                block_of[i] = found.alloc(nbytes, categories[i], where, time)
        return found.trace()

    def __len__(self) -> int:
        return len(self.events)

    @property
    def live_bytes(self) -> np.ndarray:
        """Return what is live after each event, an int64 array (N,), in bytes that were asked for."""
        return np.cumsum(self.events["action"] * self.blocks["nbytes"][self.events["block"]])

    @property
    def peak(self) -> int:
        """Return the most bytes that are live at once: no allocator needs less."""
        return int(self.live_bytes.max(initial=0))

    def category_of(self, block: int) -> str:
        """Return the category of a block."""
        return self.categories[self.blocks["category"][block]]

    def name_of(self, block: int) -> str:
        """Return what made a block: an operation and its module."""
        return self.names[self.blocks["name"][block]]

    def repeated(self, times: int) -> "AllocationTrace":
        """Return the trace `times` times in a row; what is live at its end is freed before it begins again."""
        found = Maker()
        for _ in range(times):
            live = {}
            for action, block, stream, time in self.events.tolist():
                if action == ALLOC:
                    live[block] = found.alloc(int(self.blocks["nbytes"][block]), self.category_of(block),
                                              self.name_of(block), time, stream)
                else:
                    found.free(live.pop(block), time)
            for number in live.values():
                found.free(number, time)
        return found.trace()

    def save(self, path: "str | PathLike[str]") -> Path:
        """Write the trace to a compressed file (NumPy's .npz). Returns the Path."""
        path = Path(path)
        with path.open("wb") as file:
            np.savez_compressed(file, events=self.events, blocks=self.blocks, categories=np.array(self.categories),
                                names=np.array(self.names))
        return path

    @classmethod
    def load(cls, path: "str | PathLike[str]") -> Self:
        """Read a file that `save` wrote. DamagedTrace if it is another, or was cut."""
        try:
            with Path(path).open("rb") as data, np.load(data, allow_pickle=False) as file:
                return cls(file["events"], file["blocks"], file["categories"].tolist(), file["names"].tolist())
        except FileNotFoundError:
            raise
        except Exception as error:  # of zipfile, zlib, tokenize and others, by what is damaged
            raise DamagedTrace(f"{path} is no trace that AllocationTrace.save wrote: {error}") from error


class Maker:
    """Writes a trace event by event."""

    def __init__(self):
        self._events, self._blocks, self._streams = [], [], []
        self._categories, self._names = {}, {}

    def alloc(self, nbytes, category="", name="", time=0, stream=0):
        """Take a block; returns its number."""
        number = len(self._blocks)
        self._blocks.append((nbytes, self._categories.setdefault(category, len(self._categories)),
                             self._names.setdefault(name, len(self._names))))
        self._streams.append(stream)
        self._events.append((ALLOC, number, stream, time))
        return number

    def free(self, number, time=0):
        """Free a block."""
        self._events.append((FREE, number, self._streams[number], time))

    def trace(self):
        """Return what was written."""
        return AllocationTrace(np.array(self._events, dtype=EVENT), np.array(self._blocks, dtype=BLOCK),
                               list(self._categories) or [""], list(self._names) or [""])
