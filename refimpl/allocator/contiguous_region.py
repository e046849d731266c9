"""ZeRO-R's M_D: what lives long has contiguous memory of its own, so that it leaves no holes among what lives briefly.

    one pool   |ckpt|· temp ·|ckpt|· temp ·|ckpt|· ·|      checkpoints of activations stand between what was freed
    regions    |ckpt|ckpt|ckpt|  |· · · · · · · · · |      and what is free stays in one piece

In a step with recomputation, checkpoints and gradients live long, what is recomputed and gradients of activations live
briefly. They are asked for by turns. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (2020), section 6.3. Nothing is moved, but it has to be known beforehand how much will live long.
"""

import numpy as np
import torch

from ..common.allocations import ALLOC
from ..common.lifetimes import Lifetimes
from .device import OutOfMemory
from .free_list import PlannedPool


class ContiguousRegion:
    """Memory of `nbytes` that is allocated once; tensors that live long are copied into it, one after the other.

    `kept = region.copy_in(checkpoint)` in forward, `region.clear()` after backward. `used`: bytes so far.
    """

    def __init__(self, nbytes, device=None, alignment=512):
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.alignment, self.used = alignment, 0

    def copy_in(self, tensor):
        """Return a copy of a tensor, contiguous, in the region: the tensor itself can be freed. OutOfMemory if the
        region is too small."""
        size = -(-tensor.nbytes // self.alignment) * self.alignment
        if self.used + size > self.memory.numel():
            raise OutOfMemory(f"{size} bytes for a tensor of {tuple(tensor.shape)}: the region has "
                              f"{self.memory.numel()}, {self.used} of them used; make it as large as what lives long "
                              "together", size)
        place = self.memory[self.used:self.used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self.used += size
        return place.copy_(tensor.detach())  # a copy with no graph: the original can be freed

    def clear(self):
        """Make the region empty: tensors that were copied in may not be read any more."""
        self.used = 0


def lives_long(trace, share=0.1):
    """Return booleans (B,): which blocks live for more than this share of the trace's events."""
    lifetimes = Lifetimes.of(trace)
    return lifetimes.ends - lifetimes.begins > share * len(trace)


def _room(trace, long, policy, alignment):
    """Return bytes in which what lives long finds room. Where it comes and goes in several sizes, that is more than is
    live at once, by 0.5 % or a few: holes stay in the region, too."""
    events = trace.events[long[trace.events["block"]]]
    sizes = -(-trace.blocks["nbytes"] // alignment) * alignment
    room = int((events["action"] * sizes[events["block"]]).cumsum().max(initial=0))
    while room and not _fits(events, trace.blocks["nbytes"], PlannedPool(room, policy, alignment)):
        room += -(-room // 200 // alignment) * alignment
    return room


def _fits(events, nbytes, pool):
    live = {}
    try:
        for action, block, stream, _ in events.tolist():
            if action == ALLOC:
                live[block] = pool.allocate(int(nbytes[block]), stream)
            else:
                pool.free(live.pop(block))
    except OutOfMemory:
        return False
    return True


class RegionPool:
    """For replays: a pool of `capacity` bytes, of which as many as needed are a region for what lives long.

    - `long`: booleans (B,), which blocks of the trace live long; by default those of `lives_long`.

    As an allocator of `replay(trace, RegionPool(trace, capacity))`: requests come in the order of the trace.
    """

    def __init__(self, trace, capacity, long=None, policy="best_fit", alignment=512):
        long = lives_long(trace) if long is None else np.asarray(long)
        taken = trace.events["action"] == ALLOC
        self.region_bytes = min(_room(trace, long, policy, alignment), capacity)
        self._long = iter(long[trace.events["block"][taken]].tolist())
        self._pools = [PlannedPool(capacity - self.region_bytes, policy, alignment),
                       PlannedPool(self.region_bytes, policy, alignment)]
        self._place, self.limit = {}, capacity  # id of a block → its pool

    reserved = property(lambda self: sum(pool.reserved for pool in self._pools))
    allocated = property(lambda self: sum(pool.allocated for pool in self._pools))
    requested = property(lambda self: sum(pool.requested for pool in self._pools))

    def rounded(self, nbytes):
        """Return the bytes that a request takes."""
        return self._pools[0].rounded(nbytes)

    def allocate(self, nbytes, stream=0):
        """Return a Block of the region, if the trace's next block lives long, or of the rest. OutOfMemory."""
        long = next(self._long)  # the order of the trace is all that tells
        block = self._pools[long].allocate(nbytes, stream)
        self._place[id(block)] = long
        return block

    def free(self, block):
        """Give a block back."""
        self._pools[self._place.pop(id(block))].free(block)

    def why(self, size, stream):
        """Return (free bytes, bytes of the largest hole, the live blocks beside it) of what lives briefly."""
        return self._pools[0].why(size, stream)
