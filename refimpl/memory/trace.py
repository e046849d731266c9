"""Trace: what a tracker wrote down, and everything that can be read from it.

A storage has one category for its whole life, decided only when the trace is read: that a tensor was saved for
backward, or became a gradient, is known only after it was allocated.
"""

import time
from collections import Counter
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

import numpy as np

from .ledger import (
    ACTIVATIONS,
    BUFFERS,
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER_STATE,
    PARAMETERS,
    TEMPORARIES,
    Ledger,
)

BUILD, FORWARD, BACKWARD, STEP = "build", "forward", "backward", "step"
START, END = "(start)", "(end)"


@dataclass(slots=True)
class StorageRecord:
    """One tensor storage: what made it, and what was learnt of it afterwards.

    `roles` are categories that its owner gave it (a module's parameter, an optimizer's state …). The flags below
    it decide between activation and temporary.
    """

    device: str
    op: str  # the operation that made it; START if it is older than the trace
    phase: str
    module: str
    born: int  # index of that operation; -1 if older
    nbytes: int  # as of now: a storage can be resized
    alive: bool = True
    mark: str | None = None  # a category that outranks every role
    roles: set = field(default_factory=set)
    held_by_optimizer: bool = False  # in an optimizer's param_groups
    saved: bool = False  # autograd keeps it, seen by our own hook
    offered: bool = False  # a technique's pack hook was asked to keep it
    packed: bool = False  # made by a technique while packing, or inside an autograd.Function
    kept: bool = False  # born before a backward and alive when it began
    freed_by_backward: bool = False  # … and freed in it


class Op(NamedTuple):
    """One line of the timeline: an operation, its phase, the module it ran in, and when it was done (ns since 1970)."""

    name: str
    phase: str
    module: str
    time_ns: int


class Moment(NamedTuple):
    """The bytes alive right after one operation."""

    index: int
    operation: str
    phase: str
    module: str
    ledger: Ledger


# Who wins when a storage has several roles, e.g. a weight that a matmul also saved for backward.
_PRIORITY = (PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE, INPUTS)


def category_of(record, master_weights):
    """Decide the category of one storage, from all that is known of it.

    An activation is what autograd saved. Where a technique's own hooks hide that, it is what the technique was
    offered or made, if it lives on until backward; or what backward alone was holding. A tensor that the user holds
    (logits, say) survives backward and is a temporary. `master_weights`: whether tensors that only an optimizer holds
    are copies of a module's parameters (then they are optimizer state) or the parameters themselves.
    """
    if record.mark is not None:
        return record.mark
    for role in _PRIORITY:
        if role in record.roles:
            return role
    if record.held_by_optimizer:
        return OPTIMIZER_STATE if master_weights else PARAMETERS
    survives = record.kept or record.alive
    recomputed = record.offered and record.phase == BACKWARD
    if record.saved or recomputed or record.freed_by_backward or (survives and (record.offered or record.packed)):
        return ACTIVATIONS
    return TEMPORARIES


class Timeline:
    """Bytes by category after every operation: `.ops` (N) and `.nbytes`, an int64 array (N, len(.categories)).

    Indexed or iterated it gives Moments; a slice, a list of them.
    """

    def __init__(self, ops, categories, nbytes):
        self.ops, self.categories, self.nbytes = ops, categories, nbytes
        self.totals = nbytes.sum(axis=1)

    def __len__(self):
        return len(self.ops)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        index = range(len(self.ops))[index]
        name, phase, module, _ = self.ops[index]
        nbytes = self.nbytes[index].tolist()
        return Moment(index, name, phase, module, Ledger(zip(self.categories, nbytes, strict=True)))

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def peak(self, phase=None):
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

    def __init__(self, ops=(), records=(), events=(), first_call=None, device=None, began_ns=None, notes=()):
        self.ops, self.records, self.events = list(ops), list(records), list(events)
        self.first_call = first_call  # index of the first operation inside a module's forward
        self.notes = list(notes)
        self._device = device
        self.began_ns = began_ns if began_ns or self.ops else time.time_ns()  # with nothing in it yet: it begins now

    @property
    def devices(self):
        """Return the devices that held a storage, e.g. `["cpu", "cuda:0"]`."""
        return sorted({record.device for record in self.records})

    @property
    def device(self):
        """Return the device that the readings below are of."""
        accelerators = [device for device in self.devices if device != "cpu"]
        return self._device or (accelerators or ["cpu"])[0]

    def on(self, device):
        """Return the same recording read on `device` (`"cpu"`, `"cuda:0"`); ValueError if it held nothing there."""
        device = str(device)
        if device not in self.devices:
            raise ValueError(f"nothing was allocated on {device!r}; this trace saw {', '.join(self.devices) or 'none'}")
        return Trace(self.ops, self.records, self.events, self.first_call, device, self.began_ns, self.notes)

    def categories(self):
        """Return the category of every storage record, in order."""
        modules_seen = any(PARAMETERS in record.roles for record in self.records)
        return [category_of(record, modules_seen) for record in self.records]

    @property
    def timeline(self):
        """Return bytes by category over time: the first row is from the start, the last from now."""
        found, device = self.categories(), self.device
        names = [*CATEGORIES, *sorted(set(found).difference(CATEGORIES))]
        column = {name: i for i, name in enumerate(names)}
        deltas = np.zeros((len(self.ops) + 2, len(names)), dtype=np.int64)
        for index, record, delta in self.events:
            if self.records[record].device == device:
                deltas[index + 1, column[found[record]]] += delta
        return Timeline(self._lines(), names, deltas.cumsum(axis=0))

    def _lines(self):
        """Return the operations with a line for the start and one for the end, and building as a phase of its own."""
        first = self.first_call or 0
        ops = [op._replace(phase=BUILD) if i < first and op.phase == FORWARD else op for i, op in enumerate(self.ops)]
        begin, end = (ops[0], ops[-1]) if ops else (Op("", FORWARD, "", 0),) * 2
        began = self.began_ns or begin.time_ns
        return [begin._replace(name=START, module="", time_ns=began), *ops, end._replace(name=END, module="")]

    @property
    def start(self):
        """Return the Ledger of what was alive when the context was entered."""
        return self.timeline[0].ledger

    @property
    def now(self):
        """Return the Ledger of what is alive; after the context, what was alive when it ended."""
        return self.timeline[-1].ledger

    @property
    def peak(self):
        """Return the Ledger at the moment with the most bytes."""
        return self.peak_moment().ledger

    def peak_moment(self, phase=None):
        """Return the Moment of the peak: operation, phase, module and ledger; of one phase if `phase` is given."""
        return self.timeline.peak(phase)

    def top(self, k=5, by="module", phase=None):
        """List the `k` largest holders of bytes at the peak (of `phase`, if given): [(name, bytes), …].

        `by`: "category", or what made the storages: "module", "operation".
        """
        if by not in ("category", "module", "operation"):
            raise ValueError(f"by={by!r}: expected 'category', 'module' or 'operation'")
        row = self.peak_moment(phase).index
        held, categories = Counter(), self.categories()
        for index, i, delta in self.events:
            record = self.records[i]
            if index + 1 <= row and record.device == self.device:
                names = {"category": categories[i], "module": record.module or "(no module)", "operation": record.op}
                held[names[by]] += delta
        return sorted(((n, b) for n, b in held.items() if b), key=lambda item: (-item[1], item[0]))[:k]

    def __reduce__(self):
        # What travels between processes is the recording, never the live listener.
        return Trace, (self.ops, self.records, self.events, self.first_call, self._device, self.began_ns,
                       self.notes)

    def __repr__(self):
        moment = self.peak_moment()
        where = f"{moment.operation} in {moment.module or 'no module'}, {moment.phase}"
        return f"peak on {self.device}, after {where}:\n{moment.ledger!r}" + "".join(
            f"\nnote: {note}" for note in self.notes)

    def _repr_html_(self):
        moment = self.peak_moment()
        where = f"<code>{moment.operation}</code> in <code>{moment.module or 'no module'}</code>, {moment.phase}"
        return f"<p>peak on {self.device}, after {where}</p>{moment.ledger._repr_html_()}" + "".join(
            f"<p>note: {escape(note)}</p>" for note in self.notes)

    def plot(self, predicted=None, **labels):
        """Draw this trace in the figure of every page; see `memory.plot`."""
        from .figure import plot

        return plot(self, predicted=predicted, **labels)

    def export_chrome(self, path):
        """Write the timeline as Chrome/Perfetto counters; see `memory.chrome.export_chrome`."""
        from .chrome import export_chrome

        return export_chrome(self, path)
