"""Bytes by category after every operation."""

from typing import NamedTuple

import numpy as np

from ..ground.ledger import Ledger


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
