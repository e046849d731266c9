"""What is taken: by PyTorch's allocator of a GPU, or by the process where there is none, now and at most.

    capacity = limit, or what the device has        CUDA: the allocator's limit; CPU: of the process's data, on Linux

The allocator keeps peaks, which are read and reset from phase to phase (`memory/peaks`). A process has one high-water
mark, which is left as it is: where a phase has not raised it, its peak is what there was at its ends.
"""

import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import psutil
import torch

from ..memory.peaks import Peaks


class ProcessMeter:
    """Reads the process: `resident` bytes are what the operating system says, with libraries and everything else."""

    name, device = "cpu", -1

    def __init__(self, limit):
        self._before, self._limits = 0, None  # the limits of its data: now, and before
        self.capacity = limit or _memory_of_the_machine()
        self._mark = self._now_and_most()[1]
        if limit:
            self._set_limit(limit)

    def close(self):
        """Take the limit away."""
        self._set(1)

    @contextmanager
    def lifted(self):
        """Have no limit for a while: a report takes memory, too."""
        self._set(1)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, which):
        if self._limits:
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, self._limits[which])

    def since_the_last(self):
        """Return the peak since the last call, and what is there now, in bytes."""
        now, mark = self._now_and_most()
        peak, self._mark = (mark if mark > self._mark else max(now, self._before)), max(mark, self._mark)
        self._before = now
        return {"peak": peak, "now": now}

    def state(self):
        """Return what is free and who has the rest, when a request has failed."""
        now = self._now_and_most()[0]
        free = max(0, self._limits[0][0] - _of_status("VmData")[0] if self._limits else self.capacity - now)
        return {"capacity": self.capacity, "allocated": now, "reserved": now, "by others": 0, "free": free,
                "largest free": free}

    def _set_limit(self, limit):
        """Let requests fail that would take the process's data beyond `limit`. Where the system does not hold a process
        to that, it is only told."""
        try:
            import resource

            before = resource.getrlimit(resource.RLIMIT_DATA)
            self._limits = (_of_status("VmData")[0] + max(0, limit - self._now_and_most()[0]), before[1]), before
            self._set(0)
        except (ImportError, OSError, ValueError):
            self._limits = None

    @property
    def holds(self):
        """Whether requests beyond the capacity fail."""
        return self._limits is not None

    @staticmethod
    def _now_and_most():
        """Return what is resident, and the most that ever was; twice the former where the system does not tell."""
        try:
            return _of_status("VmRSS", "VmHWM")
        except OSError:
            now = psutil.Process().memory_info().rss
            return now, now


class CUDAMeter:
    """Reads PyTorch's allocator of the device that is current when it is made. `limit` has been set by then."""

    name, holds = "cuda", True

    def __init__(self, limit):
        self.device, self._peaks = torch.cuda.current_device(), Peaks()
        self._peaks.__enter__()
        self.capacity = min(limit or sys.maxsize, torch.cuda.get_device_properties(self.device).total_memory)

    def close(self):
        """Let others read their peaks alone."""
        self._peaks.__exit__(None, None, None)

    def since_the_last(self):
        """Return the peaks since the last call, and what is there now, in bytes."""
        found = self._peaks.since_the_last([self.device])
        return {"peak": found["allocated"], "reserved": found["reserved"], "now": found["now"]}

    lifted = nullcontext

    def largest_free(self):
        """Return the bytes of the largest hole in the segments: free blocks side by side are one."""
        segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == self.device]
        return max((block["size"] for segment in segments for block in segment["blocks"]
                    if block["state"] == "inactive"), default=0)

    def state(self):
        """Return what is free and who has the rest, when a request has failed."""
        allocated, reserved = torch.cuda.memory_allocated(self.device), torch.cuda.memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        room = min(free, max(0, self.capacity - reserved))
        requested = torch.cuda.memory_stats(self.device)["requested_bytes.all.current"]
        return {"capacity": self.capacity, "requested": requested, "allocated": allocated, "reserved": reserved,
                "by others": total - free - reserved, "free": room + reserved - allocated,
                "largest free": max(room, self.largest_free())}


def limit_cuda(limit):
    """Let each device have `limit` bytes at most, as soon as CUDA begins; return a function that takes it back."""
    before = {}

    def begin():
        for device in range(torch.cuda.device_count()):
            before[device] = torch._C._cuda_getMemoryFraction(device)
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)

    def end():
        for device, share in before.items():
            torch.cuda.set_per_process_memory_fraction(share, device)

    torch.cuda._lazy_call(begin)
    return end


def _memory_of_the_machine():
    """Return the bytes of the machine, or of the container that the process is in."""
    total = psutil.virtual_memory().total
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(path).read_text()))
        except (OSError, ValueError):  # none, or "max"
            pass
    return total


def _of_status(*names):
    """Return some lines of Linux' /proc/self/status, in bytes."""
    file = os.open("/proc/self/status", os.O_RDONLY)
    try:
        found = os.read(file, 2**14)
    finally:
        os.close(file)
    starts = [found.index(name.encode() + b":") + len(name) + 1 for name in names]
    return [int(found[at : found.index(b"kB", at)]) * 1024 for at in starts]
