"""Tensors of buckets in a store's file: each bucket has an extent of it, as long as its size is the same."""

import functools
from dataclasses import dataclass

from torch._subclasses.fake_tensor import FakeTensor

from ..errors import StoreError
from .buffer_pool import BufferPool
from .extents import FileExtents
from .file import BlockFile, aligned
from .flat import Flat
from .pace import Pace
from .transfers import TransferThreads


@dataclass
class DiskTraffic:
    """Bytes that went to the file and came from it, in whole blocks."""

    written: int = 0
    read: int = 0


class Space:
    """Writes the tensors of a key to the file and reads them again; arguments are those of `DiskStore`."""

    def __init__(self, folder, capacity_bytes, buffer_bytes, buffer_count, thread_count, link):
        self.capacity_bytes, self.traffic, self.failure = capacity_bytes, DiskTraffic(), None
        self.file = BlockFile(folder)
        buffers = {way: BufferPool(buffer_count // 2, buffer_bytes) for way in ("write", "read")}
        self._transfers = TransferThreads(self.file, buffers, thread_count, Pace(link))
        self.extents, self._writing = FileExtents(), {}  # key → DiskTransfer
        if capacity_bytes is not None:
            try:
                self.file.reserve(aligned(capacity_bytes))
            except StoreError:
                self._transfers.close()
                raise

    def close(self):
        """Give up the file, with all that is in it."""
        self._transfers.close()

    def allocate(self, key, nbytes):
        """Return (offset, bytes) of a bucket, which are on the disk from now on. StoreError if there is no room."""
        return self.extents.allocate(key, nbytes, functools.partial(self._reserve, key, nbytes))

    def _reserve(self, key, nbytes, end):
        if self.capacity_bytes is not None and end > aligned(self.capacity_bytes):
            raise StoreError(None, f"{key} has {nbytes:,} bytes, and {self.extents.end:,} of capacity_bytes="
                                   f"{self.capacity_bytes:,} are taken: pass at least {end:,}")
        self.file.reserve(end)

    def write(self, key, tensors):
        """Write tensors. Return a DiskTransfer, or None in a dry run, as soon as all bytes are in buffers."""
        if transfer := self._writing.pop(key, None):  # an earlier one must not overtake this
            transfer.wait()
        offset, nbytes = self.allocate(key, sum(tensor.nbytes for tensor in tensors))
        self.traffic.written += nbytes
        if flat := self._flat(tensors):  # none in a dry run
            transfer = self._writing[key] = self._transfers.writing(flat)
            try:
                self._transfers.write(transfer, flat, offset)
            except BaseException:  # such as Ctrl-C: the tensors have their bytes, nothing is lost
                del self._writing[key]
                transfer.settle()
                raise
        return transfer

    def read(self, key, tensors):
        """Begin to read tensors. Return a DiskTransfer, or None in a dry run."""
        offset, nbytes = self.extents.of[key]
        self.traffic.read += nbytes
        flat = self._flat(tensors)
        return flat and self._transfers.read(flat, offset, key, self._writing.get(key))

    def flush(self):
        """Return when all that was written is in the file."""
        for transfer in list(self._writing.values()):
            transfer.settle()
        self.check()

    def check(self):
        """Raise what went wrong behind the caller's back: then contents are lost, and nothing goes on."""
        for key in [key for key, transfer in list(self._writing.items()) if transfer.done()]:
            transfer = self._writing.pop(key, None)
            self.failure = self.failure or (transfer and transfer.error)
        if self.failure is not None:
            raise self.failure

    def _flat(self, tensors):
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return None
        for buffers in self._transfers.buffers.values():
            buffers.make(pinned=any(tensor.is_cuda for tensor in tensors))
        return Flat(tensors)
