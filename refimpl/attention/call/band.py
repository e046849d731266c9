"""Which keys a query sees: a band along the diagonal, and what dense and tiled attention need to know of it.

Query i of T is at key position i + S − T: the last query beside the last key ("aligned bottom-right"). It sees
`left` keys to the left of that position and `right` to the right, as with flash-attention's window_size=(left, right);
None is no bound. Ranges are half open, as in Python: (first, end).
"""

from typing import NamedTuple

import torch


class Band(NamedTuple):
    """The band of T queries and S keys; T or S may be 0 (a sequence of a packed batch)."""

    T: int
    S: int
    left: int | None = None
    right: int | None = None

    @classmethod
    def of(cls, T, S, causal, window):
        """Make the band i − j ≤ window, and j ≤ i if `causal`, else j − i ≤ window, with i counted as a key
        position."""
        return cls(T, S, window, 0 if causal else window)

    def _first_key(self, query):
        return 0 if self.left is None else max(0, query + self.S - self.T - self.left)

    def _end_key(self, query):
        return self.S if self.right is None else min(self.S, query + self.S - self.T + self.right + 1)

    @property
    def fully_masked(self):
        """Return the number of queries that see no key. They are the first ones: later queries are further right."""
        if self.S == 0 or self.right is None:
            return self.T if self.S == 0 else 0
        return min(self.T, max(0, self.T - self.S - self.right))

    def keys_seen(self, rows):
        """Return (first, end) of the keys that any of the queries `rows` = (first, end) sees; first = end if none."""
        first, end = self._first_key(rows[0]), self._end_key(rows[1] - 1)
        return (first, end) if first < end else (0, 0)

    def all_seen(self, rows, keys):
        """Tell whether each of the queries `rows` sees all of `keys`."""
        return self._first_key(rows[1] - 1) <= keys[0] and keys[1] <= self._end_key(rows[0])

    def mask(self, rows, keys, device):
        """Return (rows, keys) booleans, True where a query does not see a key; None if each sees all of these keys."""
        if self.all_seen(rows, keys):
            return None
        position = torch.arange(*rows, device=device)[:, None] + (self.S - self.T)
        key = torch.arange(*keys, device=device)
        if self.right is None:
            return key < position - self.left
        mask = key > position + self.right
        return mask if self.left is None else mask.logical_or_(key < position - self.left)

    def pairs(self):
        """Count the (query, key) pairs that see each other: Σ over queries of end − first, in closed form."""
        shift, T, S = self.S - self.T, self.T, self.S
        ends = T * S if self.right is None else _clamped_sum(shift + self.right + 1, T, S)
        firsts = 0 if self.left is None else _clamped_sum(shift - self.left, T, S)
        return ends - firsts


def _clamped_sum(start, count, top):
    """Return Σ of min(max(x, 0), top) for x = start … start + count − 1."""

    def below(n):  # Σ over 0 ≤ x < n
        n = max(n, 0)
        return n * (n - 1) // 2 if n <= top + 1 else top * (top + 1) // 2 + (n - top - 1) * top

    return below(start + count) - below(start)


def tiles(span, size):
    """Cut `span` = (first, end) into [(first, end), …] of `size`, the last one shorter."""
    return [(first, min(first + size, span[1])) for first in range(span[0], span[1], size)]
