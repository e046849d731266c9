"""Copies between a device and host memory, beside the computation: what moves the bytes of a store.

    link = link_of(tensor.device)
    copy = link.start("to host", [(host, tensor)], host)     # returns at once
    copy.wait()                                              # what is computed from here on comes after the copy

On CUDA a copy runs on a stream of its own, one for each direction, from or to page-locked memory (`StreamLink`). On a
CPU, where both memories are one, `SimulatedLink` makes the same copies in the same order, and can take as long as a
link of a given rate.
"""

import ctypes
import mmap
import sys

import torch
from torch._guards import active_fake_mode

from ..comm.backend.clock import now, since_1970, sleep_until
from ..common.marks import mark
from ..common.spans import started

TO_HOST, TO_DEVICE = DIRECTIONS = "to host", "to device"
HOST_MEMORY = "host memory"  # the category of what was moved there


def host_bytes(nbytes, device):
    """Return `nbytes` of host memory, a flat uint8 tensor; page-locked for copies from and to a CUDA device, and of a
    fixed size then. RuntimeError if the driver does not lock so much.

    Page-locked memory does not move, so the device reads and writes it while the CPU does something else. PyTorch's
    own pinned tensors are rounded up to a power of two; here just these bytes are locked.
    """
    if device.type == "cuda" and nbytes and active_fake_mode() is None:
        return mark(torch.frombuffer(LockedPages(-1, nbytes), dtype=torch.uint8), HOST_MEMORY)
    return mark(torch.empty(nbytes, dtype=torch.uint8, device="cpu"), HOST_MEMORY)


class LockedPages(mmap.mmap):
    """Host memory whose pages are locked until it is freed, which is after the last tensor on it."""

    def __init__(self, _, nbytes):  # _: −1, by which mmap makes memory without a file
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        if error := int(torch.cuda.cudart().cudaHostRegister(self.address, nbytes, 0)):
            self.address = None
            raise RuntimeError(f"the driver does not lock {nbytes} bytes of host memory (CUDA error {error}): raise "
                               "the limit of locked memory (`ulimit -l`), or offload less")

    def __del__(self):
        if self.address is not None and not sys.is_finalizing():  # the end of the process unlocks all
            torch.cuda.cudart().cudaHostUnregister(self.address)


class Copy:
    """A copy that is on its way. As a span of an active recorder (`common.spans`) its kind is the direction."""

    def __init__(self, direction, flat, name):
        self._span, self._done = started(direction, flat, name=name), False

    def launched(self):
        """Note that the copy runs by itself from now on."""
        if self._span is not None:
            self._span.launched(self.is_done, self.ended)
        return self

    def wait(self):
        """Let what is computed from here on come after the copy."""
        self._end(self._wait)

    def finish(self):
        """Return when the copy is done."""
        self._end(self._finish)

    def _end(self, wait):
        span, self._span = self._span, None
        if span is None:
            wait()
            return
        with span.waiting():
            wait()

    def ended(self):
        """Return when it ended (ns since 1970), None if that is not known."""
        return None


class StreamCopy(Copy):
    """A copy on a CUDA stream."""

    def __init__(self, direction, flat, name, event, device):
        super().__init__(direction, flat, name)
        self.event, self.device = event, device

    def is_done(self):
        """Tell whether the copy has ended."""
        return self.event.query()

    def _wait(self):
        torch.cuda.current_stream(self.device).wait_event(self.event)

    def _finish(self):
        self.event.synchronize()


class StreamLink:
    """Copy on two more streams of a CUDA device, one for each direction: a link carries both at a time.

    A copy begins after the work that is queued on the current stream, and after the copy `after`. What it reads and
    writes on the device may be freed at once: PyTorch gives its memory away when the copy is done.
    """

    def __init__(self, device):
        self.device = device
        self._streams = {direction: torch.cuda.Stream(device) for direction in DIRECTIONS}

    def start(self, direction, pairs, whole, after=None, name=""):
        """Start to copy [(target, source)], in order; return the Copy. `whole`: a tensor of as many bytes."""
        stream, event = self._streams[direction], torch.cuda.Event()
        copy = StreamCopy(direction, whole, name, event, self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))  # which may still have to compute what is copied
        if after is not None:
            stream.wait_event(after.event)
        with torch.cuda.stream(stream), torch.no_grad():
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                (source if direction == TO_HOST else target).record_stream(stream)
            event.record(stream)
        return copy.launched()

    def finish(self):
        """Return when all copies are done."""
        for stream in self._streams.values():
            stream.synchronize()


class TimedCopy(Copy):
    """A copy that was made already, and is said to end at a moment of the host's clock."""

    def __init__(self, direction, flat, name, end):
        super().__init__(direction, flat, name)
        self.end = end

    def is_done(self):
        """Tell whether the moment has come."""
        return now() >= self.end

    def ended(self):
        """Return when it ended (ns since 1970)."""
        return since_1970(self.end)

    def _wait(self):
        if active_fake_mode() is None:  # in a dry run no time passes
            sleep_until(self.end)

    _finish = _wait


class SimulatedLink:
    """Copy within host memory, at once. With a `rate` (a `comm.Link`, bytes per second in each direction) a copy ends
    when a link of that rate would have carried it: after `after`, and after those before it in its direction."""

    def __init__(self, rate=None):
        self.rate, self._free = rate, dict.fromkeys(DIRECTIONS, 0.0)

    def start(self, direction, pairs, whole, after=None, name=""):
        """Copy [(target, source)]; return the Copy. `whole`: a tensor of as many bytes."""
        begin = max(now(), self._free[direction], after.end if after is not None else 0.0)
        end = begin if self.rate is None else begin + self.rate.seconds("send", whole.nbytes, 2)
        self._free[direction] = end  # a link carries one copy at a time in a direction
        copy = TimedCopy(direction, whole, name, end)
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)
        return copy.launched()

    def finish(self):
        """Return when all copies are done."""
        if active_fake_mode() is None:
            sleep_until(max(self._free.values()))


def link_of(device, rate=None):
    """Return what copies between `device` and host memory. ValueError for a rate of a link that is real."""
    real = device.type == "cuda" and active_fake_mode() is None
    if real and rate is not None:
        raise ValueError(f"rate={rate!r}, and {device} has a link of its own rate: leave rate out; a rate is for "
                         "rehearsals on a CPU")
    return StreamLink(device) if real else SimulatedLink(rate)
