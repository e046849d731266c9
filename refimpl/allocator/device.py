"""Where a simulated allocator's segments come from: a device of so many bytes, and no memory."""

CAPACITY = 80 * 2**30
BASE, STEP = 2**40, 2 * 2**20  # the first address; segments begin at multiples of 2 MiB


class OutOfMemory(MemoryError):
    """Raised if a device has no memory for a request. `size`: its bytes."""

    def __init__(self, message, size):
        super().__init__(message)
        self.size = size


class VirtualDevice:
    """Gives out addresses that are never used twice, as long as less than `capacity` bytes are in use.

    A GPU maps memory in pages of 2 MiB wherever it has some, so a free page serves every segment.
    """

    def __init__(self, capacity=None):
        self.capacity = CAPACITY if capacity is None else capacity
        self.used, self._next = 0, BASE
        if self.capacity < 1:
            raise ValueError(f"capacity={capacity}: expected at least 1 byte")

    def malloc(self, nbytes):
        """Return the address of a new segment, or None."""
        if not self.map(None, nbytes):
            return None
        return self.reserve(nbytes)

    def free(self, address, nbytes):
        """Take a segment back."""
        self.used -= nbytes

    def reserve(self, nbytes):
        """Return as many addresses, without memory."""
        address, self._next = self._next, self._next + -(-nbytes // STEP) * STEP
        return address

    def unreserve(self, address):
        """Take addresses back."""

    def map(self, address, nbytes):
        """Give memory to these addresses; returns True, or None if there is too little."""
        if self.used + nbytes > self.capacity:
            return None
        self.used += nbytes
        return True

    def unmap(self, address, nbytes):
        """Take the memory of these addresses back."""
        self.used -= nbytes
