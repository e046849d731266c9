"""Threads that move blocks: some call the file, one copies and sums, so that the file is never waited for by a copy.

    write     caller: tensors → buffer       file thread: buffer → file      second thread: checksum
    read      file thread: file → buffer     second thread: checksum, buffer → tensors

While one block is in a call, the next one is copied. A buffer is lent until its block is through, and there are as many
as were asked for, so a caller who writes faster than the disk waits. Reading has buffers of its own: those of writing
may all wait behind a block that is to be read.
"""

import queue
import threading
import weakref

from ..errors import DamagedBlock
from .checksum import checksum
from .file import aligned

STOP = None


class DiskTransfer:
    """Counts the blocks of one bucket that are under way. `wait` returns when none is, and raises what went wrong."""

    def __init__(self, blocks):
        self._left, self._lock, self._done, self.error = blocks, threading.Lock(), threading.Event(), None
        if not blocks:
            self._done.set()

    def block_done(self, error=None):
        """Count a block."""
        with self._lock:
            self.error = self.error or error
            self._left -= 1
            if not self._left:
                self._done.set()

    def abandon(self, blocks, error):
        """Count blocks that nobody will move."""
        for _ in range(blocks):
            self.block_done(error)

    def done(self):
        """Tell whether all blocks are through."""
        return self._done.is_set()

    def settle(self):
        """Return when all blocks are through, well or not."""
        self._done.wait()

    def wait(self):
        """Return when all blocks are through. Raises the first error."""
        self._done.wait()
        if self.error is not None:
            raise self.error


class TransferThreads:
    """Writes and reads buckets, block by block.

    - `file`: a BlockFile; `buffers`: {"write": BufferPool, "read": BufferPool}.
    - `threads`: how many call the file at a time.
    - `pace`: called around each transfer, for a slower link.
    - `sums[offset]`: the checksum of the block that begins there.
    """

    def __init__(self, file, buffers, threads, pace):
        self.file, self.buffers, self.sums, self._pace = file, buffers, {}, pace
        self._calls, self._copies = queue.SimpleQueue(), queue.SimpleQueue()
        queues = [self._calls] * threads + [self._copies]
        self._threads = [threading.Thread(target=_work, args=(each,), daemon=True, name="disk store")
                         for each in queues]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _stop, self._calls, self._copies, self._threads, file)

    def close(self):
        """Let what is under way end, and give the file up."""
        self._end()

    def writing(self, flat):
        """Return the DiskTransfer of a Flat that is to be written."""
        blocks = len(range(0, flat.nbytes, self.buffers["write"].nbytes))
        return DiskTransfer(2 * blocks)  # a block is written and summed

    def write(self, transfer, flat, offset):
        """Write a Flat to the file from `offset` on. Return as soon as all of it is in buffers."""
        places = range(0, flat.nbytes, self.buffers["write"].nbytes)
        for number, begin in enumerate(places):
            buffer = None
            try:
                buffer = self.buffers["write"].lend()
                nbytes = aligned(flat.copy_out(buffer, begin))
            except BaseException as error:  # such as Ctrl-C while the disk is slow
                if buffer is not None:
                    self.buffers["write"].give_back(buffer)
                transfer.abandon(2 * (len(places) - number), error)
                raise
            lent = _Lent(self.buffers["write"], buffer, 2)  # two: one writes it, one sums it
            # summed by one thread while another one writes
            self._copies.put((self._sum, transfer, lent, nbytes, offset + begin))
            self._calls.put((self._write, transfer, lent, nbytes, offset + begin))

    def read(self, flat, offset, key, after=None):
        """Begin to read a Flat from `offset` on, after the DiskTransfer that writes it. Return a DiskTransfer."""
        places = range(0, flat.nbytes, self.buffers["read"].nbytes)
        transfer = DiskTransfer(len(places))
        for begin in places:
            self._calls.put((self._read, transfer, flat, offset, begin, key, after))
        return transfer

    # Each runs in a thread, and hands its buffer on or back, whatever happens.

    def _write(self, transfer, lent, nbytes, offset):
        try:
            if transfer.error is None:
                with self._pace(nbytes):
                    self.file.write(lent.buffer.memory[:nbytes], offset)
        finally:
            lent.give_back()
        transfer.block_done()

    def _sum(self, transfer, lent, nbytes, offset):
        try:
            self.sums[offset] = checksum(lent.buffer.array[:nbytes])
        finally:
            lent.give_back()
        transfer.block_done()

    def _read(self, transfer, flat, offset, begin, key, after):
        if after is not None:
            after.wait()
        buffer = self.buffers["read"].lend()
        lent = _Lent(self.buffers["read"], buffer, 1)
        try:
            nbytes = aligned(min(flat.nbytes - begin, buffer.nbytes))
            if transfer.error is None:
                with self._pace(nbytes):
                    self.file.read(buffer.memory[:nbytes], offset + begin)
        except BaseException:
            lent.give_back()
            raise
        self._copies.put((self._check, transfer, flat, lent, nbytes, offset, begin, key))

    def _check(self, transfer, flat, lent, nbytes, offset, begin, key):
        try:
            if transfer.error is None:
                found, expected = checksum(lent.buffer.array[:nbytes]), self.sums[offset + begin]
                if found != expected:
                    raise DamagedBlock(None, f"bytes {begin:,} to {begin + nbytes:,} of {key} were not read as they "
                                             f"were written, to {offset + begin:,} in the store's file in "
                                             f"{self.file.folder}: checksum {found:#x}, expected {expected:#x}; load "
                                             "the last checkpoint, and look after the disk or the memory")
                flat.copy_back(lent.buffer, begin)
        finally:
            lent.give_back()
        transfer.block_done()


class _Lent:
    """A buffer that several threads look at: the last one gives it back."""

    def __init__(self, buffers, buffer, users):
        self.buffer, self._buffers, self._users, self._lock = buffer, buffers, users, threading.Lock()

    def give_back(self):
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._buffers.give_back(self.buffer)


def _work(jobs):
    """Do one job after the other. An error is the transfer's, which raises it in whoever waits for it."""
    while (job := jobs.get()) is not STOP:
        do, transfer, *args = job
        try:
            do(transfer, *args)
        except BaseException as error:
            transfer.block_done(error)
        del job, do, transfer, args  # or a thread at rest would keep the store alive


def _stop(calls, copies, threads, file):
    """End the threads; those that call the file first, for they hand blocks on to the other."""
    *callers, copier = threads
    for _ in callers:
        calls.put(STOP)
    for thread in callers:
        _join(thread)
    copies.put(STOP)
    _join(copier)
    file.close()


def _join(thread):
    if thread is not threading.current_thread():  # the collector of garbage may run in any
        thread.join()
