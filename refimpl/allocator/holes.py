"""Holes of a pool, found in O(log n) steps: the smallest that is large enough, or the first.

Best fit looks at sizes: holes are sorted by (size, place). First fit looks at places: holes are sorted by place, in
chunks of at most 128, and over the chunks stands a tree in which each node has the largest size below it.

                 64            a request of 40 goes down, left where that is enough: here to the second
             64      48        chunk, in which it takes the first hole of 40 or more
           16  64  48   8

The tree is an array: node i has the children 2i and 2i + 1, and chunk c is node C + c.
"""

from bisect import bisect_left, bisect_right

from sortedcontainers import SortedList


class BySize:
    """Holes for best fit."""

    def __init__(self):
        self._sorted = SortedList()

    def add(self, place, size):
        """Add a hole of `size` bytes; `place` is anything that can be compared."""
        self._sorted.add((size, place))

    def remove(self, place, size):
        """Take a hole out."""
        self._sorted.remove((size, place))

    def change(self, place, size, new_place, new_size):
        """Let a hole begin and end elsewhere; no other hole is between the old place and the new."""
        self._sorted.remove((size, place))
        self._sorted.add((new_size, new_place))

    def find(self, size):
        """Return (place, size) of the smallest hole of `size` bytes or more, the first of equal ones; None if there is
        none."""
        at = self._sorted.bisect_left((size,))
        return self._sorted[at][::-1] if at < len(self._sorted) else None

    @property
    def largest(self):
        """Return the bytes of the largest hole, 0 if there is none."""
        return self._sorted[-1][0] if self._sorted else 0


CHUNK = 64  # holes


class ByPlace:
    """Holes for first fit."""

    def __init__(self):
        self._chunks = [([], [])]  # of each chunk: places in order, sizes
        self._rebuild()

    def add(self, place, size):
        """Add a hole of `size` bytes; `place` is a number."""
        chunk = max(0, bisect_right(self._firsts, place) - 1)
        places, sizes = self._chunks[chunk]
        at = bisect_left(places, place)
        places.insert(at, place)
        sizes.insert(at, size)
        if len(places) > CHUNK:
            half = CHUNK // 2  # two halves: the next insertions find room
            self._chunks[chunk:chunk + 1] = [(places[:half], sizes[:half]), (places[half:], sizes[half:])]
            self._rebuild()
        else:
            self._firsts[chunk] = places[0]
            self._update(chunk)

    def remove(self, place, size):
        """Take a hole out."""
        chunk = bisect_right(self._firsts, place) - 1
        places, sizes = self._chunks[chunk]
        at = bisect_left(places, place)
        del places[at], sizes[at]
        if not places and len(self._chunks) > 1:
            del self._chunks[chunk]
            self._rebuild()
        else:
            self._update(chunk)

    def change(self, place, size, new_place, new_size):
        """Let a hole begin and end elsewhere; no other hole is between the old place and the new."""
        chunk = max(0, bisect_right(self._firsts, place) - 1)
        places, sizes = self._chunks[chunk]
        at = bisect_left(places, place)
        places[at], sizes[at] = new_place, new_size
        self._firsts[chunk] = places[0]
        if new_size > self._tree[self._leaves + chunk] or size == self._tree[self._leaves + chunk]:
            self._update(chunk)

    def find(self, size):
        """Return (place, size) of the first hole of `size` bytes or more; None if there is none."""
        tree, node = self._tree, 1
        if tree[node] < size:
            return None
        while node < self._leaves:
            node = 2 * node if tree[2 * node] >= size else 2 * node + 1
        places, sizes = self._chunks[node - self._leaves]
        at = next(at for at, each in enumerate(sizes) if each >= size)
        return places[at], sizes[at]

    @property
    def largest(self):
        """Return the bytes of the largest hole, 0 if there is none."""
        return self._tree[1]

    def _update(self, chunk):
        """Write a chunk's largest size into the tree."""
        tree, node = self._tree, self._leaves + chunk
        tree[node] = most = max(self._chunks[chunk][1], default=0)
        while node > 1:
            other = tree[node ^ 1]
            most = other if other > most else most
            node >>= 1
            if tree[node] == most:  # what stands above does not change either
                return
            tree[node] = most

    def _rebuild(self):
        """Make the tree anew, as there are more chunks, or fewer."""
        self._leaves = 1 << (len(self._chunks) - 1).bit_length()
        self._firsts = [places[0] if places else 0 for places, _ in self._chunks]
        self._tree = [0] * (2 * self._leaves)
        self._tree[self._leaves:self._leaves + len(self._chunks)] = [max(sizes, default=0) for _, sizes in self._chunks]
        for node in range(self._leaves - 1, 0, -1):
            self._tree[node] = max(self._tree[2 * node], self._tree[2 * node + 1])
