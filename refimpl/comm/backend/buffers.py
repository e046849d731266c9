"""What a collective reads from and writes to: the caller's own tensors, or copies where a backend cannot use them."""

import torch
from torch import Tensor, strided
from torch._subclasses.fake_tensor import FakeTensor

from ...common.marks import mark
from .tensors import NAMED, check_out, describe, resolved, same_memory

IN_PLACE = ("all_reduce", "broadcast")  # torch reads from and writes to one tensor


class CollectiveBuffers:
    """Chooses buffers for a Communicator, which inherits this: it has `rank`, `_group` and `_nccl`."""

    def _source_and_landing(self, x, out, in_place=False):
        """Return (source, landing): x where the backend can read it, and a tensor like `out` that it can write to.

        With `in_place` both are one tensor, which holds x.
        """
        staged = self._staged(out)  # x is on the same device
        plain = out.is_contiguous() and not (staged or out.requires_grad or out.is_neg() or out.is_conj())
        landing = out if plain else self._landing(out)
        if not in_place:
            return x if x.is_contiguous() and not staged else self._source(x), landing
        if landing is not x and not same_memory(landing, x):
            landing.copy_(x)
        return landing, landing

    def _out_or_new(self, out, shape, x, collective):
        """Return `out`, or a new tensor if it is None. Raises TypeError or ValueError if `out` does not fit."""
        if out is None:
            return mark(torch.empty(shape, dtype=x.dtype, device=x.device), "communication")
        if out is x and collective in IN_PLACE and x.is_contiguous():  # fast path
            return out
        if not isinstance(out, Tensor):
            raise TypeError(f"out={type(out).__name__}: expected a tensor")
        if out.shape != shape or out.dtype != x.dtype or out.device != x.device:
            raise ValueError(f"out has {describe(out)}: expected {describe(x, shape)}")
        check_out(collective, x, out, self.rank)
        return out

    def _source(self, x):
        """Return x where the backend can read it: contiguous, and on the host if it cannot read x's device."""
        if x.is_contiguous() and not self._staged(x):
            return x
        there = x.to("cpu", copy=True) if self._staged(x) else x
        return mark(there.contiguous(), "communication")

    def _landing(self, out):
        """Return `out`, or a new tensor like it if the backend cannot write to `out`."""
        staged = self._staged(out)
        if out.is_contiguous() and not (staged or out.is_neg() or out.is_conj()):
            return out.detach() if out.requires_grad else out
        device = "cpu" if staged else out.device
        return mark(torch.empty(out.shape, dtype=out.dtype, device=device), "communication")

    def _staged(self, x):
        """Tell whether x is copied through host memory, as gloo needs it for CUDA tensors."""
        return x.is_cuda and not self._nccl

    def _without_autograd(self, x):
        """Return x without autograd. TypeError if a collective cannot move it."""
        if type(x) is Tensor and x.dtype in NAMED and x.layout is strided and not (
                x.requires_grad or x.is_meta or x.is_neg() or x.is_nested):  # fast path
            return x
        if not isinstance(x, Tensor):
            raise TypeError(f"a collective moves tensors, and this is {type(x).__name__}: pass torch.tensor(…)")
        if x.layout is not strided or x.is_nested or x.is_quantized:
            kind = "quantized" if x.is_quantized else x.layout
            kind = "nested" if x.is_nested else kind
            raise TypeError(f"a collective moves dense tensors, and this one is {kind}")
        if self._group is not None and (isinstance(x, FakeTensor) or x.is_meta):
            raise TypeError("a fake or meta tensor has no data to send: give the dry run a "
                            "FakeCommunicator(rank, world_size)")
        return resolved(x.detach() if x.requires_grad else x)
