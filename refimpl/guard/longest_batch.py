"""The longest batch so far, and the length at which one would not fit.

    bytes(L) = a + b L + c L²     of the steps with as many rows, by the most that each has beside what is known
"""

from collections import defaultdict

import numpy as np

from ..explain.longest import POINTS, fitted

KEPT = 64  # lengths of batches of as many rows: the shortest go
FURTHER = 1.25  # times the length of a batch that is there: beyond it nothing is said


class LongestBatch:
    """Batches by rows and length, and the bytes that each took beside what is known."""

    def __init__(self):
        self._most = defaultdict(dict)  # rows -> {length: bytes}
        self.longest = self.largest = 0  # its length; numbers of the largest one

    def add(self, shape, nbytes):
        """Note a step's batch, and the bytes of its peak beside what is known. Return whether it is the longest."""
        rows, length = rows_and_length(shape)
        most = self._most[rows]
        most[length] = max(most.get(length, 0), nbytes)
        if len(most) > KEPT:
            del most[min(most)]
        was, self.longest = self.longest, max(self.longest, length)
        self.largest = max(self.largest, rows * length)
        return 0 < was < length

    def would_not_fit(self, shape, room):
        """Return the length, in as many rows, from which on a batch would take more than `room` bytes; None if three
        lengths are not known, or no length up to FURTHER times this one would."""
        rows, length = rows_and_length(shape)
        most = self._most[rows]
        if len(most) < POINTS:
            return None
        lengths = np.arange(length + 1, int(FURTHER * length) + 1)
        too_long = lengths[fitted(list(most), list(most.values()))(lengths) > room]
        return int(too_long[0]) if len(too_long) else None


def rows_and_length(shape):
    """Return how many rows a batch has, and their length: tokens, or pixels."""
    rows, *rest = shape or (1,)
    if len(rest) >= 3:  # images: channels, height, width
        return rows, int(np.prod(rest[1:]))
    return rows, rest[0] if rest else 1
