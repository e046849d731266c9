"""A fixed number of aligned buffers, made once, lent and given back: all the host memory that a store takes."""

import queue

import torch

from ...common.marks import mark
from ..copies import HOST_MEMORY
from .file import BLOCK


class Buffer:
    """Is `nbytes` of host memory at an aligned address: as a `tensor`, as an `array`, as `memory` for a system call.

    Pinned, if its bytes come from a GPU or go there: the GPU's copy engine reads and writes pinned memory by itself.
    """

    def __init__(self, nbytes, pinned):
        # a block more: torch aligns to 64 bytes, O_DIRECT wants a block's
        whole = torch.empty(nbytes + BLOCK, dtype=torch.uint8, pin_memory=pinned)
        first = -whole.data_ptr() % BLOCK
        self.nbytes, self.tensor = nbytes, mark(whole, HOST_MEMORY)[first : first + nbytes]
        self.array = self.tensor.numpy()
        self.memory = memoryview(self.array)


class BufferPool:
    """Lends `count` buffers of `nbytes` each. They are made when the first is asked for."""

    def __init__(self, count, nbytes):
        self.count, self.nbytes, self._free, self._made = count, nbytes, queue.SimpleQueue(), False

    def make(self, pinned):
        """Make all buffers, if they are not made yet."""
        if not self._made:
            for _ in range(self.count):
                self._free.put(Buffer(self.nbytes, pinned))
            self._made = True

    def lend(self):
        """Return a buffer, when one is free."""
        return self._free.get()

    def give_back(self, buffer):
        """Let somebody else have it."""
        self._free.put(buffer)
