"""Recompute only when memory is short: decided block by block, against what the device has.

The peak of a step is at most threshold · budget + the larger of two things that must fit beside it: the loss after the
blocks, and what the backward of one block takes on top of what the block kept. (Unless a step that recomputes every
block is above that already.)
"""

from functools import partial

import psutil
import torch

from ..memory.options import check_options
from .policies import Recomputing
from .region import checkpointed


class AdaptiveCheckpoint(Recomputing):
    """Recompute blocks until the rest of them can be kept.

    After `AdaptiveCheckpoint(0.8).apply(model.blocks)` every forward decides for each block. Or call it in place of a
    function: `adaptive(block, x)`. `.recomputed` holds the decisions of the last forward, one bool for each block.

    - `memory_threshold`: the share of the budget that may be in use, above 0 and up to 1. The rest is for what follows
      the blocks.
    - `budget`: bytes; by default what the device can give this process (CUDA: free and reserved; CPU: all its memory).
    - `used`: a function that returns the bytes in use now; by default the device's allocator, on a CPU the process.

    The rule for a block that kept c bytes when it was last kept (unknown: as the largest known), with n blocks from it
    to the end:

        keep if used + n·c ≤ memory_threshold · budget

    So the first blocks are recomputed and the last are kept, which is the cheap order: what a block keeps is there from
    its forward to its backward, and the last ones' is gone before the first ones are recomputed.

    The peak of past steps is not used: it tells what this model needed, not what is free. Raises ValueError for a
    threshold or a budget out of range, and TypeError for an unknown option.
    """

    def __init__(self, memory_threshold=0.8, budget=None, *, used=None, device=None, **unknown):
        super().__init__()
        check_options(unknown, ("memory_threshold", "budget", "used", "device"), type(self).__name__)
        if not isinstance(memory_threshold, (int, float)) or not 0 < memory_threshold <= 1:  # NaN is neither
            raise ValueError(f"memory_threshold={memory_threshold!r}: expected a share above 0, up to 1")
        if budget is not None and (not isinstance(budget, (int, float)) or not 0 < budget < float("inf")):
            raise ValueError(f"budget={budget!r}: expected a positive number of bytes, or None for the device's own")
        self.memory_threshold, self.budget = memory_threshold, budget
        self.device = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
        self._used = used or (lambda: bytes_in_use(self.device))
        self._costs, self._blocks = {}, 0
        self.recomputed = []

    def apply(self, blocks):
        """Decide for each of `blocks`, in this order, in every forward from now on. Returns self."""
        self._blocks = len(blocks)
        for index, block in enumerate(blocks):
            self.add(block, how=partial(self._decide, index))
        return self

    def __call__(self, fn, *args, **kwargs):
        return self._decide(None, fn, *args, **kwargs)

    @property
    def limit(self):
        """Return the bytes that may be in use while there are more blocks to come."""
        return self.memory_threshold * (capacity(self.device) if self.budget is None else self.budget)

    def _decide(self, index, fn, /, *args, **kwargs):
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        before, left = self._used(), 1 if index is None else self._blocks - index
        cost = self._costs.get(index, max(self._costs.values(), default=0))
        keep = before + left * cost <= self.limit
        outputs = fn(*args, **kwargs) if keep else checkpointed(fn, args, kwargs)
        if keep:
            self._costs[index] = max(0, self._used() - before)
        self.recomputed = [*(self.recomputed if index else []), not keep]
        return outputs


def capacity(device):
    """Return the bytes that this process can have on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().total


def bytes_in_use(device):
    """Return the bytes of tensors on a CUDA device; on a CPU the resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss
