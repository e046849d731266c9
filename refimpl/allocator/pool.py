"""A memory pool: tensors as views of a few large segments, and a free list that finds a hole for each.

`free_list` says which hole. The articles' GPUMemoryPool counts elements of one dtype and moves tensors when it grows,
so views of them point at freed memory. Here sizes are bytes, and the pool grows by another segment.
"""

import math
import threading
from collections.abc import Sequence
from numbers import Integral
from typing import Self

import torch

from .free_list import FreeList

SEGMENT = 2**48  # an offset in the pool is a segment's number times this, plus a byte in it


class PoolExhausted(MemoryError):
    """Raised if a pool may not grow by what a request needs."""


class GPUMemoryPool(FreeList):
    """Backs tensors of any dtype and shape by views of segments that it allocated before.

    - `initial_capacity`: bytes of the first segment.
    - `alignment`: every tensor begins at a multiple of so many bytes. A power of two, 16 or more.
    - `policy`: "first_fit" or "best_fit".
    - `device`: where segments are; by default the accelerator, or the CPU.
    - `max_capacity`: bytes that all segments may have together. None: what the device has.

    `with GPUMemoryPool(2**20) as pool: x = pool.allocate((128, 64))`. A search takes O(log n) steps with n holes.
    Threads may share a pool.

    ValueError for a size, an alignment or a policy that cannot be; TypeError for a size that is no integer.
    """

    def __init__(self, initial_capacity: int, alignment: int = 512, policy: str = "best_fit",
                 device: torch.device | str | None = None, max_capacity: int | None = None) -> None:
        super().__init__(policy, alignment)
        for name, size in (("initial_capacity", initial_capacity), ("max_capacity", max_capacity or 1)):
            if not isinstance(size, Integral):
                raise TypeError(f"{name}={size!r}: expected an integer, bytes, such as 2**30")
        if initial_capacity < 1 or max_capacity is not None and max_capacity < initial_capacity:
            raise ValueError(f"initial_capacity={initial_capacity}, max_capacity={max_capacity}: expected 1 byte or "
                             "more, and a maximum that is no less")
        self.device = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
        self.max_capacity, self.segments, self.closed = max_capacity, [], False
        self._live = {}  # address → (where it begins, its size, bytes that were asked for, its number)
        self._typed, self._shapes, self._lock, self._count = {}, {}, threading.RLock(), 0
        self.capacity = self.requested = 0
        self._expand(initial_capacity)

    # --- tensors -----------------------------------------------------------------------------------------------------

    def allocate(self, shape: int | Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an uninitialized tensor of this shape, contiguous, in the pool's memory.

        It lives until `free`: the pool does not notice that nobody has it any more. ValueError for a shape without
        elements or with a negative size; TypeError for a dtype that is none; PoolExhausted, with the largest hole, if
        the pool may not grow.
        """
        self._check_open()
        if isinstance(shape, list):
            shape = tuple(shape)
        if (shape, dtype) not in self._shapes:  # a step asks for the same shapes again and again
            self._shapes[shape, dtype] = self._layout(shape, dtype)
        nbytes, size, sizes, strides = self._shapes[shape, dtype]
        with self._lock:
            begin = self._allocate(size)
            if begin is None:
                self._expand(size)
                begin = self._allocate(size)
            segment, offset = divmod(begin, SEGMENT)
            flat, first = self._of(segment, dtype)
            tensor = flat.as_strided(sizes, strides, first + offset // dtype.itemsize)
            self._count = tensor.number_in_pool = self._count + 1  # an address comes again, a number does not
            self._live[tensor.data_ptr()] = begin, size, nbytes, self._count
            self.requested += nbytes
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Give the memory of a tensor that `allocate` returned back. Nobody may read it, or a view of it, afterwards.

        ValueError for a tensor that is not from this pool, that was freed before, though another has its address now,
        and for a view of one.
        """
        with self._lock:
            self._check_open()
            begin, size, nbytes, number = self._live.get(address := tensor.data_ptr(), (0, 0, 0, 0))
            if not number or number != getattr(tensor, "number_in_pool", None):
                inside = any(0 <= address - segment.data_ptr() < segment.nbytes for segment in self.segments)
                raise ValueError(f"a tensor at {address:#x}, {tuple(tensor.shape)}: expected one that allocate "
                                 "returned; " + ("it was freed before, or is a view of one" if inside else
                                                 "it is not from this pool"))
            del self._live[address]
            self.requested -= nbytes
            self._release(begin, size)

    def close(self) -> None:
        """Give all segments back. ValueError, which says how many, if tensors are live."""
        with self._lock:
            if self._live:
                raise ValueError(f"{len(self._live)} tensors of {self.allocated} bytes are live: free them before "
                                 "closing")
            self.segments, self._typed, self.closed, self.capacity = [], {}, True, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if kind is None:
            self.close()

    # --- what is free ------------------------------------------------------------------------------------------------

    @property
    def fragmentation(self) -> float:
        """Return the share of free bytes that are not in the largest hole, 0 to 1."""
        free = self.capacity - self.allocated
        return 1 - self.largest_hole / free if free else 0.0

    def _expand(self, nbytes):
        """Add a segment of `nbytes`, or as large as all before if that is more and may be: live tensors stay."""
        least = -(-nbytes // self.alignment) * self.alignment
        room = math.inf if self.max_capacity is None else self.max_capacity - self.capacity
        if least > room:
            raise PoolExhausted(f"{nbytes} bytes: {self.capacity} of at most {self.max_capacity} are in segments, "
                                f"{self.allocated} of these live, and the largest hole has {self.largest_hole}; free "
                                "tensors, or give a larger max_capacity")
        # doubles, as long as it may
        size = least if self.capacity > room else max(least, self.capacity // self.alignment * self.alignment)
        raw = _taken(size + self.alignment, self.device)
        if raw is None and size > least:
            size, raw = least, _taken(least + self.alignment, self.device)
        if raw is None:
            raise PoolExhausted(f"{nbytes} bytes: {self.device} has no room for another segment; {self.allocated} of "
                                f"{self.capacity} bytes are live, and the largest hole has {self.largest_hole}")
        first = -raw.data_ptr() % self.alignment  # PyTorch's own alignment may be smaller
        self.segments.append(raw[first:first + size])
        self.capacity += size
        self._add_hole((len(self.segments) - 1) * SEGMENT, size)

    # --- views -------------------------------------------------------------------------------------------------------

    def _of(self, segment, dtype):
        """Return a segment as a flat tensor of a dtype, and where it begins in its storage."""
        if (segment, dtype) not in self._typed:
            flat = self.segments[segment].view(dtype)
            self._typed[segment, dtype] = flat, flat.storage_offset()
        return self._typed[segment, dtype]

    def _layout(self, shape, dtype):
        """Return (bytes, bytes that it takes, sizes, strides) of a contiguous tensor."""
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtype={dtype!r}: expected one of torch's, as in allocate((128, 64), torch.float32)")
        sizes = torch.Size((shape,) if isinstance(shape, int) else shape)
        if any(size < 1 for size in sizes):
            raise ValueError(f"shape {tuple(sizes)}: expected at least one element, and no negative size")
        nbytes = math.prod(sizes) * dtype.itemsize
        return nbytes, -(-nbytes // self.alignment) * self.alignment, sizes, torch.empty(sizes, device="meta").stride()

    def _check_open(self):
        if self.closed:
            raise ValueError("the pool is closed: make another")


def _taken(nbytes, device):
    """Return memory of a device; None if it has no more."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:  # of a CPU, too: "DefaultCPUAllocator: can't allocate memory"
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            return None
        raise
