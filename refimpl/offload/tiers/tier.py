"""Room in one tier. What is on its way out has room that somebody else may take, who then comes after it."""

from collections import deque


class Tier:
    """Counts the bytes of a tier of `capacity`: those that are free, and those that are `leaving`, [(move, bytes)].

    `used`: bytes that rest here or are on their way here. `peak`: the most that they ever were.
    """

    def __init__(self, name, capacity):
        self.name, self.capacity, self._free, self._leaving, self.peak = name, capacity, capacity, deque(), 0

    @property
    def room(self):
        """Return the bytes that can be taken, now or when what leaves has left."""
        return self._free + sum(nbytes for _, nbytes in self._leaving)

    @property
    def used(self):
        """Return the bytes that rest here or come."""
        return self.capacity - self.room

    def allocate(self, nbytes):
        """Take room that is there. Return the moves after which it is free."""
        after = []
        while self._free < nbytes and self._leaving:
            move, left = self._leaving.popleft()  # the one that began first ends first
            self._free += left
            after.append(move)
        self._free -= nbytes
        self.peak = max(self.peak, self.used)
        return after

    def free(self, nbytes, move=None):
        """Give room back, now or when `move` has ended."""
        if move is None:
            self._free += nbytes
        else:
            self._leaving.append((move, nbytes))

    def grow(self, nbytes):
        """Let the tier have more capacity, or less."""
        self.capacity += nbytes
        self._free += nbytes
