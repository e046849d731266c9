"""Copies between a CUDA device and pinned host memory, beside the computation."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


class CUDATransfer:
    """Copy on one more stream for each device, in both directions and in the order of the calls: what was sent out has
    arrived before it is fetched back.

    Pinned memory does not move, so the device reads and writes it without the CPU. PyTorch keeps freed pinned blocks
    for the next allocation, and rounds each up to a power of two.
    """

    def __init__(self):
        self._streams = {}

    def offloads(self, tensor):
        """Tell whether the tensor is on a device other than the host."""
        return tensor.device.type == "cuda"

    def to_host(self, flat):
        """Start a copy to the host, after the work already queued on the current stream: (pinned copy, ticket)."""
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=not isinstance(flat, FakeTensor))
        return host, self._copy(host, flat, flat.device)

    def to_device(self, host, device):
        """Start a copy to the device: (copy, ticket). Its block is the current stream's: `wait` before it is used."""
        flat = torch.empty(host.shape, dtype=host.dtype, device=device)
        return flat, self._copy(flat, host, device)

    def wait(self, ticket):
        """Let the current stream go on when the copy is done. The CPU does not wait."""
        device, done = ticket
        torch.cuda.current_stream(device).wait_event(done)

    def _copy(self, target, source, device):
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        # the source has to be computed, and the target's block free
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return device, stream.record_event()


class Rehearsal:
    """Copy within host memory, at once: for the order and the bytes where there is no GPU.

    `.log`: ("out" or "in", bytes) of every copy.
    """

    def __init__(self) -> None:
        self.log = []

    def offloads(self, tensor: torch.Tensor) -> bool:
        """Return True: everything is copied."""
        return True

    def to_host(self, flat: torch.Tensor) -> Any:
        """Return (copy, None)."""
        self.log.append(("out", flat.nbytes))
        return flat.clone(), None

    def to_device(self, host: Any, device: Any) -> Any:
        """Return (copy, None)."""
        self.log.append(("in", host.nbytes))
        return host.clone(), None

    def wait(self, ticket: Any) -> None:
        """No-op: every copy is done already."""
