"""Who holds the bytes of a peak: which module, line, operation, tensor.

Parameters, buffers, gradients and optimizer state belong to the module whose parameter it is; everything else to the
module in which it was made, forward or backward. What a line made in backward is what backward took for that line.
"""

from collections import Counter
from os.path import commonprefix
from typing import NamedTuple

import numpy as np

from ..common.ledger import category_name
from .storage_records import BUILD, FORWARD, START, Line

NO_MODULE, OLDER = "(no module)", "(before the trace)"
BY = ("module", "line", "source", "operation", "tensor", "category")


class Held(NamedTuple):
    """One storage that is alive at a moment; see `Trace.held`.

    `nbytes`: its bytes, counted once, however many tensors share it. `shape` and `dtype` are of the first of these.
    `line` is the program's own, `source` that of the library which called PyTorch; None if it was there before.
    """

    nbytes: int
    category: str
    tensor: str
    shape: tuple
    dtype: str
    module: str
    line: Line | None
    source: Line | None
    operation: str
    phase: str
    record: int  # its place in `Trace.records`

    @property
    def name(self) -> str:
        """Return the tensor's name, its type and shape, and its module where the name does not tell: one line."""
        kind = f"{self.dtype} {self.shape}".strip() if self.dtype else ""
        where = f"in {self.module}" if self.module and self.module not in self.tensor else ""
        return " ".join(part for part in (self.tensor, kind, where) if part)


def held(trace, phase=None, category=None):
    """List the storages that are alive at the peak of `trace`; see `Trace.held`."""
    wanted = None if category is None else category_name(category)
    nbytes, categories = bytes_after(trace, trace.peak_moment(phase).index), trace.categories()
    found = [_held(trace, i, int(nbytes[i]), categories[i]) for i in np.flatnonzero(nbytes).tolist()
             if wanted in (None, categories[i])]
    return sorted(found, key=lambda storage: -storage.nbytes)


def bytes_after(trace, row):
    """Return the bytes of each record after line `row` of the timeline, int64 (records,): of the trace's device."""
    nbytes, device = np.zeros(len(trace.records), dtype=np.int64), trace.device
    if trace.events:
        index, record, delta = np.array(trace.events, dtype=np.int64).T
        until = index < row  # row 0 is the start: row r is after operation r − 1
        np.add.at(nbytes, record[until], delta[until])
    elsewhere = [record.device != device for record in trace.records]
    nbytes[np.array(elsewhere, dtype=bool)] = 0
    return nbytes


def top(trace, k=5, by="module", phase=None, category=None):
    """List the `k` largest holders of bytes at the peak; see `Trace.top`."""
    if by not in BY:
        raise ValueError(f"by={by!r}: expected {', '.join(map(repr, BY[:-1]))} or {BY[-1]!r}")
    storages = held(trace, phase, category)
    if by == "tensor":  # each is one: two of a name are two
        rows = [(storage.name, storage.nbytes) for storage in storages]
    else:
        sums = Counter()
        for storage in storages:
            sums[_NAMES[by](storage)] += storage.nbytes
        rows = list(sums.items())
    return sorted(rows, key=lambda row: (-row[1], row[0]))[:k]


def _line_named(line, storage):
    if line is None:
        return OLDER if storage.operation == START else f"(inside of {storage.operation})"
    return f"{line}: {line.text}" if line.text else str(line)


_NAMES = {
    "module": lambda storage: storage.module or NO_MODULE,
    "line": lambda storage: _line_named(storage.line, storage),
    "source": lambda storage: _line_named(storage.source, storage),
    "operation": lambda storage: storage.operation,
    "category": lambda storage: storage.category,
}


def _held(trace, index, nbytes, category):
    record = trace.records[index]
    return Held(nbytes, category, tensor_of(record), tuple(record.shape), record.dtype, module_of(record), record.line,
                record.source, record.op, phase_of(trace, record), index)


def module_of(record):
    """Return the path of the module that a storage belongs to: what all of its owners share; "" if there is none."""
    modules = {module for module, *_ in record.owners}
    if not modules:
        return record.module
    if len(modules) == 1:
        return modules.pop()
    return ".".join(commonprefix([module.split(".") for module in modules])) or "(several modules)"


def phase_of(trace, record):
    """Return the phase in which a storage was made; before the first forward of a module, that is building."""
    return BUILD if record.phase == FORWARD and record.born < (trace.first_call or 0) else record.phase


def tensor_of(record):
    """Return the name of a storage's tensor: that of a parameter, gradient or state; else what made it."""
    names = [f"{what} of {tensor}" if what else tensor for _, tensor, what in record.owners]
    if len(names) > 1:
        return f"{len(names)} tensors, {names[0]} first"
    return names[0] if names else record.op
