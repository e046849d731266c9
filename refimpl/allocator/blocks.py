"""Blocks of a caching allocator, and the lists in which free ones are found."""

from bisect import bisect_left, insort


class Block:
    """Bytes address … address + size − 1 of a segment, between the blocks `before` and `after` there.

    - `pool`: the Pool that it belongs to; `stream`: whose requests it serves.
    - `requested`: bytes that were asked for, 0 while it is free.
    - `mapped`: False for addresses of an expandable segment without memory.
    - `segment`: the ExpandableSegment that it is in, or None; `born`: how many segments there were before its own.
    - `waits_for`: streams that still use it, though it was freed (`record_stream`).
    - `since`: how many requests its pool had seen when it became free.
    """

    __slots__ = ("address", "after", "before", "born", "free", "mapped", "pool", "requested", "segment", "since",
                 "size", "stream", "waits_for")

    def __init__(self, address, size, stream, pool, segment=None, mapped=True, born=0):
        self.address, self.size, self.stream, self.pool = address, size, stream, pool
        self.segment, self.mapped, self.born = segment, mapped, born
        self.before = self.after = None
        self.free, self.requested, self.since = True, 0, 0
        self.waits_for = set()

    @property
    def end(self):
        """Return the address behind it."""
        return self.address + self.size

    @property
    def is_whole(self):
        """Tell whether it is all of its segment."""
        return self.before is None and self.after is None

    def __repr__(self):
        state = "free" if self.free else f"{self.requested} requested"
        return f"Block({self.address:#x}, {self.size}, stream {self.stream}, {state})"

    def cut(self, size):
        """Cut the first `size` bytes off, and return them as a block before this one."""
        first = Block(self.address, size, self.stream, self.pool, self.segment, self.mapped, self.born)
        first.before, first.after = self.before, self
        if self.before is not None:
            self.before.after = first
        self.before = first
        self.address, self.size = self.address + size, self.size - size  # this one keeps its neighbours behind
        return first

    def join(self, other):
        """Take a neighbour's bytes."""
        if other is self.before:
            self.address, self.before = other.address, other.before
            if self.before is not None:
                self.before.after = self
        else:
            self.after = other.after
            if self.after is not None:
                self.after.before = self
        self.size += other.size


class Pool:
    """Free blocks of one kind: `small` or large, of the allocator itself or of a private pool (`owner`).

    Free blocks are in the order of stream, size and address, for best fit. `by_age`: of equal sizes that of the oldest
    segment comes first, as since torch 2.12. `unmapped` is in the order of stream and address.
    """

    def __init__(self, small, owner=(0, 0), by_age=False):
        self.small, self.owner, self.requests, self._by_age = small, owner, 0, by_age
        self._keys, self._blocks = [], {}
        self._unmapped_keys, self._unmapped = [], {}

    def __iter__(self):
        """Go through the free blocks, in order."""
        return (self._blocks[key[-1]] for key in list(self._keys))

    def __len__(self):
        return len(self._keys)

    def _key(self, block):
        return block.stream, block.size, block.born * self._by_age, block.address  # PyTorch's order of its std::set

    def add(self, block):
        """Add a free block, or one without memory."""
        if block.mapped:
            block.free, block.requested, block.since = True, 0, self.requests
            insort(self._keys, self._key(block))
            self._blocks[block.address] = block
        else:
            insort(self._unmapped_keys, (block.stream, block.address))
            self._unmapped[block.stream, block.address] = block

    def remove(self, block):
        """Take a block out."""
        if block.mapped:
            del self._keys[bisect_left(self._keys, self._key(block))]
            del self._blocks[block.address]
        else:
            del self._unmapped_keys[bisect_left(self._unmapped_keys, (block.stream, block.address))]
            del self._unmapped[block.stream, block.address]

    def grow_old(self, block, born):
        """Change when the segment of a block was born, and its place among the free ones."""
        free = self._blocks.get(block.address) is block
        if free:
            del self._keys[bisect_left(self._keys, self._key(block))]
        block.born = born
        if free:
            insort(self._keys, self._key(block))

    def at(self, address):
        """Return the free block that begins at an address; None if none does."""
        return self._blocks.get(address)

    def at_least(self, stream, size):
        """Go through the free blocks of a stream that have `size` bytes or more, the smallest first."""
        at = bisect_left(self._keys, (stream, size))  # a shorter tuple sorts before all keys that begin with it
        while at < len(self._keys) and self._keys[at][0] == stream:
            yield self._blocks[self._keys[at][-1]]
            at += 1

    def largest(self, stream):
        """Return the free blocks of a stream, the largest first."""
        keys = self._keys[bisect_left(self._keys, (stream,)):bisect_left(self._keys, (stream + 1,))]
        return [self._blocks[key[-1]] for key in reversed(keys)]

    def unmapped(self, stream):
        """Return the blocks of a stream that have addresses and no memory, in their order."""
        at = bisect_left(self._unmapped_keys, (stream,))
        return [self._unmapped[key] for key in self._unmapped_keys[at:] if key[0] == stream]
