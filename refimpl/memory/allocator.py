"""What the real allocator says about a region: the second instrument, which knows nothing of the first.

CPU: every allocation and release that PyTorch's CPU allocator made, as its profiler logs them, and its running total,
which counts those of other threads too (gloo's, DataLoader's, a user's). CUDA: the statistics of the caching allocator
and of the driver. They include what a kernel takes inside one operation, which no tracker sees; they leave out what
another library allocated (a NumPy array under a tensor).
"""

import ctypes
import functools
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch._C._profiler import _EventType

# Kineto prints a line when a profiler starts and stops; above level 5 it does not. Read at its first start.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")

ERRORS = 2  # a level of PyTorch's C++


@dataclass(frozen=True)
class Reading:
    """Hold what one device's allocator said about the region, in bytes.

    - `peak`, `net`: what tensors asked for, at the highest moment and at the end, above the start. On the CPU the
      profiler knows the size only of what was allocated under it: releases of anything older are not counted.
    - `requested`, `allocated`, `reserved` (CUDA): absolute peaks of what was asked for, of the blocks given for it
      (multiples of 512 B), and of the segments taken from the driver.
    - `driver` (CUDA): what the whole device had in use at the end, other processes included, as `mem_get_info` tells.
    - `resident` (CPU): growth of the process's resident memory, as the operating system tells it: less than `peak`
      where pages of earlier tensors are used again.
    - `segments`, `blocks` (CUDA): how many there are at the end, and in `inactive` the bytes free inside segments.
    """

    device: str
    peak: int
    net: int
    requested: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    driver: int | None = None
    resident: int | None = None
    segments: int | None = None
    blocks: int | None = None
    inactive: int | None = None

    def rows(self) -> list[tuple[str, int]]:
        """Return [(name, int)] of what this device reports."""
        return [(name, value) for name, value in vars(self).items() if isinstance(value, int)]

    def __str__(self):
        width = max(len(f"{value:,}") for _, value in self.rows())
        return "\n".join([self.device, *(f"{name:<10}  {value:>{width},}" for name, value in self.rows())])

    __repr__ = __str__

    def _repr_html_(self):
        rows = "".join(f"<tr><td>{n}</td><td style='text-align:right'>{v:,}</td></tr>" for n, v in self.rows())
        return f"<table><thead><tr><th>{self.device}</th><th>bytes</th></tr></thead><tbody>{rows}</tbody></table>"


def measure(device: torch.device | str | None = None) -> "CPUMeasurement | CUDAMeasurement":
    """Read the real allocator: `with memory.measure() as m: step()`, then `m.peak` and the other fields of `Reading`.

    `device`: `"cpu"`, `"cuda"` …; by default a CUDA device where there is one. ValueError for a device with no
    readings.
    """
    try:
        wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ValueError(f"no allocator readings for device {device!r}: expected 'cpu' or 'cuda'") from error
    if wanted.type == "cuda":
        return CUDAMeasurement(wanted)
    if wanted.type == "cpu":
        return CPUMeasurement()
    raise ValueError(f"no allocator readings for device {str(device)!r}: expected 'cpu' or 'cuda'")


class _Measurement:
    """Opens a context, after which it has the fields of its Reading."""

    reading = None

    def __getattr__(self, name):
        if name.startswith("__") or name not in Reading.__dataclass_fields__:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        if self.reading is None:
            raise RuntimeError(f"{name} is known when the context has ended")
        return getattr(self.reading, name)

    def __repr__(self):
        return "(measuring)" if self.reading is None else repr(self.reading)

    def _repr_html_(self):
        return "(measuring)" if self.reading is None else self.reading._repr_html_()


class CPUMeasurement(_Measurement):
    """Sums the profiler's memory events in time order. `events`: [(ns, ± bytes)] of the region.

    The profiler logs the threads that it knows: this one, and autograd's. What others took and freed shows in the
    allocator's total at the next event of a known thread, and stands in `events` as one change. The profiler is one
    per process: RuntimeError if another is running.
    """

    def __enter__(self):
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("memory.measure on CPU uses the profiler, and one is running: end that one first")
        self._resident = psutil.Process().memory_info().rss
        # Not torch.profiler.profile, which makes a Python object of each operation at the end: seconds for thousands.
        self._profiler = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
        _count_all_threads(True)
        self._said = _log_level(ERRORS)
        self._profiler.__enter__()
        torch.UntypedStorage(1)  # an event at the start and one at the end: the allocator's total is known there
        return self

    def __exit__(self, *exception):
        torch.UntypedStorage(1)
        self._profiler.__exit__(*exception)
        _count_all_threads(False)
        _log_level(self._said)
        self.events = _of_this_region(self._profiler.kineto_results.experimental_event_tree())
        del self._profiler
        held = peak = 0
        for _, nbytes in self.events:
            held += nbytes
            peak = max(peak, held)
        resident = psutil.Process().memory_info().rss - self._resident
        self.reading = Reading("cpu", peak, held, resident=resident)


def _library():
    name = {"darwin": "libc10.dylib", "win32": "c10.dll"}.get(sys.platform, "libc10.so")
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))


def _log_level(level):
    """Set from which level on PyTorch's C++ writes to stderr, and return the one before; None where the build has no
    such flag. It warns of each region's first release of what is older, whose bytes are unknown to the profiler and do
    not count here."""
    try:
        flag = ctypes.c_int.in_dll(_library(), "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
    before = flag.value
    flag.value = before if level is None else level
    return before


@functools.cache
def _all_threads_flag():
    """Return the allocator's own flag. If it is set, its total also counts threads that the profiler does not know."""
    try:
        return ctypes.c_bool.in_dll(_library(), "FLAGS_caffe2_report_cpu_memory_usage")
    except (OSError, ValueError) as error:
        warnings.warn(f"memory.measure on CPU reads this thread and autograd's alone: this build of PyTorch does not "
                      f"let it count others ({error})", RuntimeWarning, stacklevel=4)
        return ctypes.c_bool()


def _count_all_threads(on):
    _all_threads_flag().value = on


def _of_this_region(tree):
    """List [(ns, ± bytes)] in time order, without the first and the last events, which are this meter's own.

    A release counts if its address was given out here: the profiler keeps the sizes of earlier regions, and would
    take them for those of what lies at the same address today.
    """
    log, events = [], list(tree)
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            of_event = event.extra_fields
            log.append((event.start_time_ns, of_event.alloc_size, of_event.ptr, of_event.total_allocated))
    here, kept, known = set(), [], None  # known: the total after the event before
    for ns, nbytes, address, total in sorted(log):  # the tree is not in time order
        by_others = 0 if known is None else total - known - nbytes
        known = total
        if by_others:
            kept.append((ns, by_others))
        if nbytes > 0 or address in here:
            (here.add if nbytes > 0 else here.discard)(address)
            kept.append((ns, nbytes))
    return kept[2:-2]  # the two storages of this meter, each made and freed


class CUDAMeasurement(_Measurement):
    """Reads `torch.cuda.memory_stats` around the region. Resets the peak statistics of the device."""

    def __init__(self, device):
        torch.cuda.init()  # there are no statistics to reset before
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    def _stats(self):
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_stats(self._device)

    def __enter__(self):
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = self._stats()
        return self

    def __exit__(self, *exception):
        stats = self._stats()
        requested, allocated, reserved = (stats.get(f"{kind}_bytes.all.peak", 0)
                                          for kind in ("requested", "allocated", "reserved"))
        start = self._start.get("requested_bytes.all.current", 0)
        net = stats.get("requested_bytes.all.current", 0) - start
        free, total = torch.cuda.mem_get_info(self._device)
        segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == self._device.index]
        blocks = [block for segment in segments for block in segment["blocks"]]
        self.reading = Reading(
            str(self._device), requested - start, net, requested, allocated, reserved, driver=total - free,
            segments=len(segments), blocks=len(blocks),
            inactive=sum(b["size"] for b in blocks if b["state"] == "inactive"))
