"""A free list: a request takes a part of a hole, and released bytes join the holes at both sides.

    |—— a ——|· · hole · ·|—— b ——|· · · · hole · · · ·|

First fit takes the hole with the lowest address, best fit the smallest that is large enough. No two holes touch.
"The Art of Computer Programming" (Knuth), volume 1, section 2.5.
"""

from .blocks import Block
from .device import OutOfMemory
from .holes import ByPlace, BySize

POLICIES = {"first_fit": ByPlace, "best_fit": BySize}


class FreeList:
    """Finds holes for sizes that are multiples of `alignment` bytes, a power of two. `allocated`: bytes in use.

    ValueError for another policy or alignment.
    """

    def __init__(self, policy: str = "best_fit", alignment: int = 512) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
        if alignment < 16 or alignment & (alignment - 1):
            raise ValueError(f"alignment={alignment}: expected a power of two, 16 or more")
        self.policy, self.alignment, self.allocated = policy, alignment, 0
        self._forget_holes()

    @property
    def largest_hole(self) -> int:
        """Return the bytes of the largest hole."""
        return self._holes.largest

    def _allocate(self, size):
        """Return where `size` bytes begin from now on; None if no hole has so many."""
        found = self._holes.find(size)
        if found is None:
            return None
        begin, room = found
        del self._sizes[begin]
        if room > size:  # the rest stays a hole, at the same end
            self._holes.change(begin, room, begin + size, room - size)
            self._sizes[begin + size], self._ends[begin + room] = room - size, begin + size
        else:
            self._holes.remove(begin, room)
            del self._ends[begin + room]
        self.allocated += size
        return begin

    def _release(self, begin, size):
        """Make these bytes a hole again."""
        self.allocated -= size
        end = begin + size
        # no two holes may touch: join both sides
        after, before = self._sizes.pop(end, None), self._ends.pop(begin, None)
        if before is not None:
            if after is not None:
                self._holes.remove(end, after)
                end += after
            self._holes.change(before, begin - before, before, end - before)
            begin = before
        elif after is not None:
            self._holes.change(end, after, begin, size + after)
            end += after
        else:
            self._holes.add(begin, size)
        self._sizes[begin], self._ends[end] = end - begin, begin

    def _forget_holes(self):
        """Begin with an empty list."""
        self._holes, self._ends, self._sizes = POLICIES[self.policy](), {}, {}  # end → begin, begin → size

    def _add_hole(self, begin, size):
        """Add a hole that touches no other."""
        self._holes.add(begin, size)
        self._sizes[begin], self._ends[begin + size] = size, begin


class PlannedPool(FreeList):
    """A pool of one segment of `capacity` bytes without memory, for replays.

    `reserved` is the highest end that was ever taken: with so many bytes the pool would have served all requests.
    """

    def __init__(self, capacity, policy="best_fit", alignment=512):
        super().__init__(policy, alignment)
        self.limit, self.reserved, self.requested = capacity, 0, 0
        self._live = {}
        self._add_hole(0, capacity // alignment * alignment)

    def rounded(self, nbytes):
        """Return the bytes that a request takes."""
        return max(self.alignment, -(-nbytes // self.alignment) * self.alignment)

    def allocate(self, nbytes, stream=0):
        """Return a Block; its address is its place. OutOfMemory if no hole has room."""
        size = self.rounded(nbytes)
        begin = self._allocate(size)
        if begin is None:
            raise OutOfMemory(f"{size} bytes for a request of {nbytes}: {self.allocated} of {self.limit} bytes are "
                              f"taken, the largest hole has {self.largest_hole}", size)
        block = self._live[begin] = Block(begin, size, stream, None)
        block.free, block.requested = False, nbytes
        self.requested, self.reserved = self.requested + nbytes, max(self.reserved, begin + size)
        return block

    def free(self, block):
        """Give a block back."""
        del self._live[block.address]
        self.requested -= block.requested
        self._release(block.address, block.size)

    def why(self, size, stream):
        """Return (free bytes, bytes of the largest hole, the live blocks beside it)."""
        largest = self.largest_hole
        begin = next((begin for begin, size in self._sizes.items() if size == largest), None)
        beside = [] if begin is None else [block for block in self._live.values()
                                           if block.end == begin or block.address == begin + largest]
        return self.limit - self.allocated, largest, beside
