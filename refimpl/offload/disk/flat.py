"""Several tensors as one run of bytes, side by side; and how their storages are emptied and filled."""

import ctypes
import sys

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

MADV_DONTNEED, MADV_HUGEPAGE = 4, 14  # of Linux's madvise(2)
PAGE, HUGE = 4096, 2 * 2**20  # bytes
LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def check_own_storages(key, tensors):
    """Raise ValueError unless each tensor is all that its storage holds: a store empties whole storages."""
    for i, tensor in enumerate(tensors):
        held = tensor.untyped_storage().nbytes()
        if held != tensor.nbytes or not tensor.is_contiguous():
            raise ValueError(f"tensor {i} of {key} has {tensor.nbytes:,} of the {held:,} bytes of its storage: a store "
                             "empties whole storages; put a contiguous tensor that shares its storage with no other")
    if len({tensor.untyped_storage()._cdata for tensor in tensors}) < len(tensors):
        raise ValueError(f"two tensors of {key} share a storage: put one of them")


def empty(tensors):
    """Free the bytes of all tensors, which stay the same objects.

    An allocator may keep what is freed: glibc's kept 33 of 32 MiB that went 1 MiB at a time. So pages of host memory
    are given back to the kernel first.
    """
    for tensor in tensors:
        _advise(tensor, MADV_DONTNEED)
        tensor.untyped_storage().resize_(0)


def fill(tensors):
    """Let all tensors have bytes again, of no particular values.

    Host memory comes by 2 MiB where the kernel has them, and not by 4 KiB, each of which costs a fault: the first copy
    into it then ran at 11 GB/s, and not at 2.4.
    """
    for tensor in tensors:
        tensor.untyped_storage().resize_(tensor.nbytes)
        if tensor.nbytes >= 2 * HUGE:
            _advise(tensor, MADV_HUGEPAGE)


def _advise(tensor, advice):
    """Tell the kernel of the whole pages of a tensor in host memory. It may decline, which changes no result."""
    if sys.platform != "linux" or tensor.device.type != "cpu" or isinstance(tensor.detach(), FakeTensor):
        return
    first = -(-tensor.data_ptr() // PAGE) * PAGE
    nbytes = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE - first
    if nbytes > 0:
        LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), advice)


class Flat:
    """Copies any stretch of the bytes of `tensors`, in their order, out to a buffer and back.

    Tensors on a GPU are copied by a stream of their own, which waits for what is queued now.
    """

    def __init__(self, tensors):
        views = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors if tensor.nbytes]
        self.nbytes = sum(view.numel() for view in views)
        self._stream = None
        if views and views[0].is_cuda:
            self._stream = torch.cuda.Stream(views[0].device)
            self._stream.wait_stream(torch.cuda.current_stream(views[0].device))
        # After `view.numpy()` a storage could not be resized; after from_dlpack it can.
        self._views = views if self._stream else [np.from_dlpack(view) for view in views]

    def copy_out(self, buffer, begin):
        """Copy bytes `begin` and following into a Buffer, as many as there are and as it holds; pad with zeros to whole
        blocks. Return their number."""
        return self._copy(buffer, begin, out=True)

    def copy_back(self, buffer, begin):
        """Copy a Buffer's bytes to `begin` and following."""
        return self._copy(buffer, begin, out=False)

    def _copy(self, buffer, begin, out):
        end, first = min(self.nbytes, begin + buffer.nbytes), 0
        for view in self._views:
            low, high = max(begin, first), min(end, first + len(view))
            if low < high:
                here, there = view[low - first : high - first], slice(low - begin, high - begin)
                if self._stream is None:
                    source, target = (here, buffer.array[there]) if out else (buffer.array[there], here)
                    np.copyto(target, source)
                else:
                    source, target = (here, buffer.tensor[there]) if out else (buffer.tensor[there], here)
                    with torch.cuda.stream(self._stream):
                        target.copy_(source, non_blocking=True)
            first += len(view)
        if self._stream is not None:
            self._stream.synchronize()
        if out:
            buffer.array[end - begin : -(-(end - begin) // 4096) * 4096] = 0
        return end - begin
