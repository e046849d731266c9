"""Tells for how long no rank has gone on: used CPU time, said anything, or written to its record.

A rank that computes is not hung, however long it takes; one that sleeps, or waits for another, uses next to no CPU
time. The caller sees both from outside. (CUDA's wait for a GPU's results uses CPU time, so it counts as computing.)
"""

import mmap
import os
import struct
import tempfile
import time
from contextlib import contextmanager, suppress

import psutil

RECORD = 2**17  # bytes of each rank's record: memory that it shares with the caller, for its world to fill but BEATS
# Ranks that wait (in an all_reduce, an all_gather, a barrier or a recv of gloo, in torch's store, in Python) use 0.14
# to 0.27 % of a core, for threads of torch that look around now and then: measured on 4 ranks for 10 s.
IDLE_SHARE = 0.01
BEATS = struct.Struct("<q")  # the last bytes of a record: how often the rank has said that it goes on
TICKS = 0.02  # seconds: twice what CPU time is counted in


_record = None  # of this process, if it is a rank


class Signs:
    """Looks for signs that ranks go on. `timeout`: seconds that they may be without one, from which follows how often
    to look."""

    def __init__(self, timeout):
        self.every, self.next = min(1, timeout / 4), 0.0  # seconds; the time to look again
        self._last = self._since = time.monotonic()  # of the last sign; of `_used`
        self._used, self._records = {}, None

    def heard(self):
        """Note that a rank has said something."""
        self._last = time.monotonic()

    def look(self, pids, records):
        """Look at the CPU time of the ranks with these pids, and at the bytes of all records. Returns the seconds that
        have passed since the last sign."""
        used, now = cpu_seconds(pids), time.monotonic()
        spare = IDLE_SHARE * (now - self._since) + TICKS
        if records != self._records or any(used[pid] - self._used.get(pid, 0) > spare for pid in pids):
            self._last = now
        if self._last > self._since:
            self._used, self._since = used, now
        self._records, self.next = records, now + self.every
        return now - self._last


def cpu_seconds(pids):
    """Return {pid: CPU seconds} of ranks: each leads a session of its own, and its child processes are in it."""
    used = dict.fromkeys(pids, 0.0)
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):  # it has just ended, or is somebody else's
            if (leader := os.getsid(pid)) in used:
                used[leader] += sum(psutil.Process(pid).cpu_times()[:4])  # its own, and of children that have ended
    return used


@contextmanager
def shared_records(size):
    """Make the records of `size` ranks. Gives the file for `map_record`, and a function that reads the bytes of all."""
    with open(os.memfd_create("records"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile() as file:
        file.truncate(size * RECORD)
        with mmap.mmap(file.fileno(), size * RECORD, prot=mmap.PROT_READ) as memory:
            yield file, lambda: memory[:]


def map_record(fd, rank):
    """Return the memory of a rank's record."""
    return memoryview(mmap.mmap(fd, RECORD, offset=rank * RECORD))


def map_own_record(fd, rank):
    """Return the memory of the record of this process, which is that rank: `beat` writes to it."""
    return set_own_record(map_record(fd, rank))


def set_own_record(memory):
    """Take `memory` for the record of this process; return it."""
    global _record
    _record = memory
    return _record


def beat():
    """Tell the caller that this rank goes on, though it uses no CPU time: it sleeps for a known time."""
    if _record is not None:
        place = RECORD - BEATS.size
        BEATS.pack_into(_record, place, BEATS.unpack_from(_record, place)[0] + 1)
