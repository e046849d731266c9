"""Best-fit decreasing: blocks in some order, each in the smallest gap that is free during its whole life.

    address ^   ┌─────┐ a block that lives at the same time
            |   └─────┘
            |   · gap ·    the smallest gap that is large enough; above everything if there is none
            |   ┌───────────┐ another
            └──────────────────> time

The large and the long-lived are hard to place, so they come first: by size, then by lifetime. This is best-fit
decreasing of bin packing, in two dimensions; Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
Inference" (2020), "greedy by size for offset calculation".
"""

import numpy as np


def by_size(lifetimes, sizes):
    """Return the blocks' numbers, largest first; of equals the one that lives longest, then the earliest."""
    return np.lexsort((lifetimes.begins, lifetimes.begins - lifetimes.ends, -sizes))


def by_area(lifetimes, sizes):
    """Return the blocks' numbers, those with the most bytes times lifetime first."""
    return np.lexsort((lifetimes.begins, -sizes * (lifetimes.ends - lifetimes.begins)))


def by_fullest(lifetimes, sizes):
    """Return the blocks' numbers: first those that live when most is live, of these the one that lives longest."""
    begins, ends = lifetimes.begins, lifetimes.ends
    change = np.zeros(int(ends.max(initial=0)) + 1, dtype=np.int64)
    np.add.at(change, begins, sizes)
    np.add.at(change, ends, -sizes)
    live = np.cumsum(change)
    fullest = np.array([live[begin:end].max(initial=0) for begin, end in zip(begins, ends, strict=True)])
    return np.lexsort((-sizes, begins - ends, -fullest))


def place(lifetimes, sizes, order, fit="best"):
    """Return offsets (B,) in bytes: blocks are placed in `order`, each in the smallest gap that is large enough.

    `fit`: "best", or "first" for the lowest gap. What is placed is kept sorted by offset, so the gaps at a block's
    life are differences of neighbours there: O(B) in compiled code for each of B blocks.
    """
    B = len(order)
    offsets, count = np.zeros(B, dtype=np.int64), 0
    rows = np.zeros((4, B), dtype=np.int64)  # begin, end, offset and top of what is placed, by offset
    begins, ends, all_sizes = lifetimes.begins.tolist(), lifetimes.ends.tolist(), sizes.tolist()
    for b in order.tolist():
        begin, end, size = begins[b], ends[b], all_sizes[b]
        if not size or begin == end:  # it overlaps nobody: any address will do
            continue
        meets = np.flatnonzero((rows[0, :count] < end) & (rows[1, :count] > begin))
        at = offsets[b] = _gap(rows[2, meets], rows[3, meets], size, fit) if len(meets) else 0
        i = int(np.searchsorted(rows[2, :count], at))
        rows[:, i + 1:count + 1] = rows[:, i:count]
        rows[:, i] = begin, end, at, at + size
        count += 1
    return offsets


def _gap(lows, tops, size, fit):
    """Return where `size` bytes fit between blocks that are sorted by their offsets `lows`."""
    covered = np.maximum.accumulate(tops)
    room = lows[1:] - covered[:-1]
    if lows[0] >= size:  # below all of them
        if fit == "first":
            return 0
        smallest, at = int(lows[0]), 0
    else:
        smallest, at = None, int(covered[-1])
    fits = np.flatnonzero(room >= size)
    if len(fits):
        i = fits[0] if fit == "first" else fits[room[fits].argmin()]
        if smallest is None or room[i] < smallest:
            at = int(covered[i])
    return at
