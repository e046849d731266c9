"""Where a simulated allocator's segments come from: a device that has a capacity and no memory."""

from bisect import bisect_left, insort

CAPACITY = 80 * 2**30
BASE, STEP = 2**40, 2 * 2**20  # the first address; segments begin at multiples of 2 MiB


class OutOfMemory(MemoryError):
    """Raised if a device has no memory for a request. `size`: its bytes."""

    def __init__(self, message: str, size: int) -> None:
        super().__init__(message)
        self.size = size


class VirtualDevice:
    """Gives out the lowest addresses that are free, as long as less than `capacity` bytes are in use.

    A GPU maps memory in pages of 2 MiB wherever it has some, so a free page serves every segment. Which addresses a
    driver gives out is its own affair; that it gives them out again matters up to torch 2.11, where among blocks of
    equal size the lowest address comes first.
    """

    def __init__(self, capacity=None):
        self.capacity = CAPACITY if capacity is None else capacity
        self.used, self._taken = 0, []  # (address, end), in order
        if self.capacity < 1:
            raise ValueError(f"capacity={capacity}: expected at least 1 byte")

    def expands(self, owner):
        """Tell whether segments of a pool may be expandable: of all, but for a MemPool with an allocator of its own."""
        return True

    def malloc(self, nbytes):
        """Return the address of a new segment, or None."""
        if not self.map(None, nbytes):
            return None
        return self.reserve(nbytes)

    def free(self, address, nbytes):
        """Take a segment back."""
        self.used -= nbytes
        self.unreserve(address)

    def reserve(self, nbytes):
        """Return as many addresses, without memory."""
        at, size = BASE, -(-nbytes // STEP) * STEP  # addresses in steps of 2 MiB, as a driver maps pages
        for first, end in self._taken:
            if at + size <= first:
                break
            at = end
        insort(self._taken, (at, at + size))
        return at

    def unreserve(self, address):
        """Take addresses back."""
        del self._taken[bisect_left(self._taken, (address,))]

    def map(self, address, nbytes):
        """Give memory to these addresses; returns True, or None if there is too little."""
        if self.used + nbytes > self.capacity:
            return None
        self.used += nbytes
        return True

    def unmap(self, address, nbytes):
        """Take the memory of these addresses back."""
        self.used -= nbytes
