"""Trace: what a tracker wrote down, and everything that can be read from it."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..common.ledger import CATEGORIES, PARAMETERS, Ledger
from ..untrusted.text import one_line
from . import top, trace_file
from .storage_records import BACKWARD, BUILD, END, FORWARD, START, STEP, Line, Op, StorageRecord, category_of

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    from ..common.figure import MemoryFigure
    from .top import Held

__all__ = ["BACKWARD", "BUILD", "END", "FORWARD", "START", "STEP", "Line", "Moment", "Op", "StorageRecord", "Timeline",
           "Trace", "category_of"]


class Moment(NamedTuple):
    """The bytes alive right after one operation: `ledger`, by category, absolute.

    `index`: its place in the timeline. `operation`: PyTorch's name of it. `phase`: "forward", "backward" or "step".
    `module`: the path of the module that ran it, "" if none did.
    """

    index: int
    operation: str
    phase: str
    module: str
    ledger: Ledger


class Timeline:
    """Bytes by category after every operation: `.ops` (N) and `.nbytes`, an int64 array (N, len(.categories)).

    Indexed or iterated it gives Moments; a slice, a list of them.
    """

    def __init__(self, ops: Sequence[Op], categories: Sequence[str], nbytes: np.ndarray) -> None:
        self.ops, self.categories, self.nbytes = ops, categories, nbytes
        self.totals = nbytes.sum(axis=1)

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        index = range(len(self.ops))[index]
        name, phase, module, _ = self.ops[index]
        nbytes = self.nbytes[index].tolist()
        return Moment(index, name, phase, module, Ledger(zip(self.categories, nbytes, strict=True)))

    def __iter__(self) -> "Iterator[Moment]":
        return (self[i] for i in range(len(self)))

    def peak(self, phase: str | None = None) -> "Moment":
        """Return the Moment with the most bytes (the first of equals), over all operations or those of one `phase`."""
        inside = np.array([phase is None or op.phase == phase for op in self.ops], dtype=bool)
        if not inside.any():
            phases = sorted({op.phase for op in self.ops})
            raise ValueError(f"no operation ran in phase {phase!r}; this timeline has {', '.join(phases)}")
        return self[int(np.where(inside, self.totals, -1).argmax())]


class Trace:
    """A finished recording: ops, storage records and the events (operation index, record index, ± bytes).

    `device`: where the bytes are counted; by default a CUDA device if the trace saw one, else the CPU. `on(device)`
    is the same recording read on another device. `began_ns`: when it began (ns since 1970), None if that is not known.
    `notes`: sentences about what the bytes leave out or rest upon, e.g. the placeholders of a dry run; printed with
    them.
    """

    def __init__(self, ops: Sequence[Op] = (), records: Sequence[StorageRecord] = (), events: Sequence[tuple] = (),
                 first_call: int | None = None, device: str | None = None, began_ns: int | None = None,
                 notes: Sequence[str] = ()) -> None:
        self.ops, self.records, self.events = list(ops), list(records), list(events)
        self.first_call = first_call  # index of the first operation inside a module's forward
        self.notes = list(notes)
        self._device = device
        self.began_ns = began_ns if began_ns or self.ops else time.time_ns()  # with nothing in it yet: it begins now

    @property
    def devices(self) -> list[str]:
        """Return the devices that held a storage, e.g. `["cpu", "cuda:0"]`."""
        return sorted({record.device for record in self.records})

    @property
    def device(self) -> str:
        """Return the device that the readings below are of."""
        accelerators = [device for device in self.devices if device != "cpu"]
        return self._device or (accelerators or ["cpu"])[0]

    def on(self, device: str) -> "Trace":
        """Return the same recording read on `device` (`"cpu"`, `"cuda:0"`); ValueError if it held nothing there."""
        device = str(device)
        if device not in self.devices:
            raise ValueError(f"nothing was allocated on {device!r}; this trace saw {', '.join(self.devices) or 'none'}")
        return Trace(self.ops, self.records, self.events, self.first_call, device, self.began_ns, self.notes)

    def until(self, index: int) -> "Trace":
        """Return the recording of what happened before the operation `index`."""
        events = [event for event in self.events if event[0] < index]
        return Trace(self.ops[:index], self.records, events, self.first_call, self._device, self.began_ns, self.notes)

    def after(self, index: int) -> "Trace":
        """Return the recording from the operation `index` on: what is alive then was there before."""
        held = Counter()
        for at, record, delta in self.events:
            held[record] += delta * (at < index)
        events = [(-1, record, nbytes) for record, nbytes in held.items() if nbytes]
        events += [(at - index, *event) for at, *event in self.events if at >= index]
        return Trace(self.ops[index:], self.records, events, 0, self._device, self.began_ns, self.notes)

    def categories(self) -> list[str]:
        """Return the category of every storage record, in order."""
        modules_seen = any(PARAMETERS in record.roles for record in self.records)
        return [category_of(record, modules_seen) for record in self.records]

    def lives(self, device: str | None = None) -> Iterator[tuple[int, StorageRecord, int]]:
        """Yield (ns since 1970, record, bytes) each time that a storage takes bytes on `device`, by default this one;
        and the same with fewer than no bytes when it gives them back. One that is resized gives all back first."""
        device, held = device or self.device, Counter()
        times = [self.began_ns or 0, *(op.time_ns for op in self.ops)]
        for index, record, delta in self.events:
            if self.records[record].device == device and delta:
                time_ns = times[min(index + 1, len(times) - 1)]
                if held[record]:
                    yield time_ns, record, -held[record]
                held[record] += delta
                if held[record]:
                    yield time_ns, record, held[record]

    @property
    def timeline(self) -> "Timeline":
        """Return bytes by category over time: the first row is from the start, the last from now."""
        found, device = self.categories(), self.device
        names = [*CATEGORIES, *sorted(set(found).difference(CATEGORIES))]
        column = {name: i for i, name in enumerate(names)}
        deltas = np.zeros((len(self.ops) + 2, len(names)), dtype=np.int64)
        for index, record, delta in self.events:
            if self.records[record].device == device:
                deltas[index + 1, column[found[record]]] += delta  # row 0 is the start, where index is −1
        return Timeline(self._lines(), names, deltas.cumsum(axis=0))

    def _lines(self):
        """Return the operations with a line for the start and one for the end, and building as a phase of its own."""
        first = self.first_call or 0
        ops = [op._replace(phase=BUILD) if i < first and op.phase == FORWARD else op for i, op in enumerate(self.ops)]
        begin, end = (ops[0], ops[-1]) if ops else (Op("", FORWARD, "", 0),) * 2
        began = self.began_ns or begin.time_ns
        return [begin._replace(name=START, module="", time_ns=began), *ops, end._replace(name=END, module="")]

    @property
    def start(self) -> Ledger:
        """Return the Ledger of what was alive when the context was entered."""
        return self.timeline[0].ledger

    @property
    def now(self) -> Ledger:
        """Return the Ledger of what is alive; after the context, what was alive when it ended."""
        return self.timeline[-1].ledger

    @property
    def peak(self) -> Ledger:
        """Return the Ledger at the moment with the most bytes."""
        return self.peak_moment().ledger

    def peak_moment(self, phase: str | None = None) -> "Moment":
        """Return the Moment of the peak: operation, phase, module and ledger; of one phase if `phase` is given."""
        return self.timeline.peak(phase)

    def top(self, k: int = 5, by: str = "module", phase: str | None = None,
            category: str | None = None) -> list[tuple[str, int]]:
        """List the `k` largest holders of bytes at the peak (of `phase`, if given): [(name, bytes), …].

        `by`: "module", "line" (the user's own), "source" (the line that called PyTorch, in a library perhaps),
        "operation", "tensor", or "category"; see `memory.top`. `category`: of these bytes only, e.g. "activations".
        ValueError for another `by`, and for a phase that did not run.
        """
        return top.top(self, k, by, phase, category)

    def held(self, phase: str | None = None, category: str | None = None) -> "list[Held]":
        """List every storage that is alive at the peak (of `phase`), the largest first: [Held, …].

        A Held has `nbytes`, `category`, `tensor`, `shape`, `dtype`, `module`, `line`, `source`, `operation` and `phase`
        (in which it was made). Their bytes sum to the peak's.
        """
        return top.held(self, phase, category)

    def __reduce__(self):
        # What travels between processes is the recording, never the live listener.
        return Trace, (self.ops, self.records, self.events, self.first_call, self._device, self.began_ns,
                       self.notes)

    def __repr__(self):
        moment = self.peak_moment()
        where = one_line(f"{moment.operation} in {moment.module or 'no module'}, {moment.phase}")
        return f"peak on {one_line(self.device)}, after {where}:\n{moment.ledger!r}" + "".join(
            f"\nnote: {one_line(note)}" for note in self.notes)

    def _repr_html_(self):
        moment = self.peak_moment()
        where = (f"<code>{escape(moment.operation)}</code> in <code>{escape(moment.module or 'no module')}</code>, "
                 f"{escape(moment.phase)}")
        return f"<p>peak on {escape(str(self.device))}, after {where}</p>{moment.ledger._repr_html_()}" + "".join(
            f"<p>note: {escape(note)}</p>" for note in self.notes)

    def plot(self, predicted: Any = None, **labels: "Trace") -> "MemoryFigure":
        """Draw this trace in the figure of every page; see `memory.plot`."""
        from ..common.figure import plot

        return plot(self, predicted=predicted, **labels)

    def save(self, path: "str | PathLike[str]") -> "Path":
        """Write this trace to a file of JSON lines, from which `memory.load(path)` reads it. Returns the Path."""
        return trace_file.save(self, path)

    def to_html(self, path: "str | PathLike[str]", title: str = "Memory over a training step") -> "Path":
        """Write one self-contained page with the timeline and whose each byte is; see `memory.page`. Returns the Path.
        """
        from .page import to_html

        return to_html(self, path, title)

    def export_snapshot(self, path: "str | PathLike[str]") -> "Path":
        """Write the timeline for PyTorch's memory viewer; see `memory.memory_viz.export_snapshot`."""
        from .memory_viz import export_snapshot

        return export_snapshot(self, path)

    def export_chrome(self, path: "str | PathLike[str]") -> "Path":
        """Write the timeline as Chrome/Perfetto counters; see `memory.chrome.export_chrome`."""
        from .chrome import export_chrome

        return export_chrome(self, path)


def load(path: "str | PathLike[str]") -> "Trace":
    """Read what `save` wrote: a Trace with all readings of the one that was saved.

    ValueError, with the file and its line, for a file of another kind or version, and for one that is damaged or cut.
    """
    return Trace(*trace_file.read(path))
