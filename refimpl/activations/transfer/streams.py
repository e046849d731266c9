"""Copies between a CUDA device and pinned host memory, beside the computation."""

import torch
from torch._subclasses.fake_tensor import FakeTensor


class CUDATransfer:
    """One more stream for each device, which makes all copies of both directions in the order in which they were asked
    for: what was sent out has arrived before it is fetched back.

    Pinned memory does not move, so the device reads and writes it without the CPU. PyTorch keeps freed pinned blocks
    for the next allocation, and rounds each up to a power of two.
    """

    def __init__(self):
        self._streams = {}

    def offloads(self, tensor):
        """Whether it lies on a device that is not the host."""
        return tensor.device.type == "cuda"

    def to_host(self, flat):
        """(pinned copy, ticket): begin to copy out, after what the current stream has been asked so far."""
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=not isinstance(flat, FakeTensor))
        return host, self._copy(host, flat, flat.device)

    def to_device(self, host, device):
        """(copy on the device, ticket): begin to copy in. Its block is the current stream's, to be waited for there."""
        flat = torch.empty(host.shape, dtype=host.dtype, device=device)
        return flat, self._copy(flat, host, device)

    def wait(self, ticket):
        """The current stream goes on when the copy is done. The CPU does not wait."""
        device, done = ticket
        torch.cuda.current_stream(device).wait_event(done)

    def _copy(self, target, source, device):
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return device, stream.record_event()


class Rehearsal:
    """A transfer within host memory, for the order and the bytes where there is no GPU: each copy is made at once.

    `.log`: ("out" or "in", bytes) of every copy.
    """

    def __init__(self):
        self.log = []

    def offloads(self, tensor):
        """Everything."""
        return True

    def to_host(self, flat):
        """(copy, None)."""
        self.log.append(("out", flat.nbytes))
        return flat.clone(), None

    def to_device(self, host, device):
        """(copy, None)."""
        self.log.append(("in", host.nbytes))
        return host.clone(), None

    def wait(self, ticket):
        """Every copy is there already."""
