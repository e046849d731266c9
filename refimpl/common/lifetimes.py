"""Lifetimes: what a planner needs to know of a trace, as intervals of time and sizes.

A block that event i takes and event j frees is live in i ≤ t < j. Two blocks may have the same addresses if their
lifetimes do not meet.
"""

from dataclasses import dataclass

import numpy as np

from .allocations import ALLOC, AllocationTrace


@dataclass
class Lifetimes:
    """B blocks as arrays (B,) of int64: block b is live in `begins[b]` ≤ t < `ends[b]`, and has `nbytes[b]` bytes.

    ValueError for arrays of different lengths, a block that ends before it begins, or a negative size.
    """

    begins: np.ndarray
    ends: np.ndarray
    nbytes: np.ndarray

    def __post_init__(self):
        self.begins, self.ends, self.nbytes = (np.asarray(each, dtype=np.int64)
                                               for each in (self.begins, self.ends, self.nbytes))
        if not len(self.begins) == len(self.ends) == len(self.nbytes):
            raise ValueError(f"{len(self.begins)} beginnings, {len(self.ends)} ends, {len(self.nbytes)} sizes: "
                             "expected one of each for a block")
        for what, wrong in (("ends before it begins", self.ends < self.begins), ("has no size", self.nbytes < 0)):
            if wrong.any():
                b = int(wrong.argmax())
                raise ValueError(f"block {b} {what}: {self.begins[b]} … {self.ends[b]}, {self.nbytes[b]} bytes")

    @classmethod
    def of(cls, trace):
        """Read an AllocationTrace, or return Lifetimes as they are. What is live at the end ends there.

        ValueError for a trace that takes one block number twice: its second life would need another number.
        """
        if isinstance(trace, cls):
            return trace
        if not isinstance(trace, AllocationTrace):
            raise TypeError(f"a plan is made of an AllocationTrace or of Lifetimes, not of a {type(trace).__name__}: "
                            "AllocationTrace.of(memory.dry_run(step))")
        blocks, is_alloc = trace.events["block"], trace.events["action"] == ALLOC
        times, B = np.arange(len(trace.events)), len(trace.blocks)
        taken = np.bincount(blocks[is_alloc], minlength=B)
        if (taken > 1).any():
            raise ValueError(f"block {int(taken.argmax())} is taken {int(taken.max())} times: expected a number for "
                             "each life, as Maker gives")
        begins, ends = np.zeros(B, dtype=np.int64), np.where(taken, len(times), 0)  # never freed: live to the end
        begins[blocks[is_alloc]] = times[is_alloc]
        ends[blocks[~is_alloc]] = times[~is_alloc]
        return cls(begins, ends, np.where(taken, trace.blocks["nbytes"], 0))

    def __len__(self):
        return len(self.begins)

    def aligned(self, alignment):
        """Return the bytes of each block, rounded up to a multiple of `alignment`."""
        return -(-self.nbytes // alignment) * alignment

    @property
    def lower_bound(self):
        """Return the most bytes that are live at once: no plan needs less."""
        return most_live(self.begins, self.ends, self.nbytes)


def most_live(begins, ends, nbytes):
    """Return the most bytes that are live at once. What ends at t does not meet what begins there."""
    there = ends > begins
    times = np.concatenate((begins[there], ends[there]))
    change = np.concatenate((nbytes[there], -nbytes[there]))
    order = np.lexsort((change, times))  # at the same time ends come first
    return int(np.cumsum(change[order]).max(initial=0))
