"""Recomputation only when memory is short: decided block by block, from the memory that the device has left.

The peak of a step is at most threshold · budget + max(a, b). Here a is what the loss after the blocks takes, and b what
the backward of one block takes above what the block kept. (A step that recomputes every block may already exceed it.)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import psutil
import torch

from ..common.keyword_options import check_options
from .policies import Recomputing
from .region import check_keep, checkpointed, outside_of_graph


class AdaptiveCheckpoint(Recomputing):
    """Recomputes blocks until all remaining ones can be kept.

    After `AdaptiveCheckpoint(0.8).apply(model.blocks)` every forward decides for each block. Or call it with a
    function: `adaptive(block, x)`. `.recomputed` holds the decisions of the last forward, one bool for each block.

    - `memory_threshold`: the share of the budget that may be in use, above 0 and up to 1. The rest is left for the loss
      and the backward.
    - `budget`: in bytes; by default all that this process can have (CUDA: free and reserved; CPU: all its memory).
    - `used`: a function that returns the bytes in use now; by default the device's allocator, on a CPU the process.
    - `keep`: how recomputed blocks keep their inputs, as in `checkpoint`. If it speaks to other ranks, all of
      them have to decide alike: give a `used` that returns the same number on each.

    A block is kept if, with n blocks from it to the end and c the bytes that it kept the last time (the largest known,
    if it was never kept),

        used + n·c ≤ memory_threshold · budget

    So the first blocks are recomputed and the last ones kept. That order is the cheaper one: a block holds its bytes
    from its forward to its backward, so the last blocks have freed theirs before the first ones are recomputed.

    Under torch.compile the blocks run uncompiled, since a graph would repeat one decision; compile each block instead.

    The peak of past steps is not used: it tells what this model needed, not what is free. Raises ValueError for a
    threshold or a budget out of range, and TypeError for an unknown option.
    """

    def __init__(self, memory_threshold: float = 0.8, budget: int | None = None, *,
                 used: Callable[[], int] | None = None, device: torch.device | str | None = None,
                 keep: Callable[[torch.Tensor], bool] | None = None, **unknown: Any) -> None:
        super().__init__()
        check_options(unknown, ("memory_threshold", "budget", "used", "device", "keep"), type(self).__name__)
        if not isinstance(memory_threshold, (int, float)) or not 0 < memory_threshold <= 1:  # NaN is neither
            raise ValueError(f"memory_threshold={memory_threshold!r}: expected a share above 0, up to 1")
        if budget is not None and (not isinstance(budget, (int, float)) or not 0 < budget < float("inf")):
            raise ValueError(f"budget={budget!r}: expected a positive number of bytes, or None for the device's own")
        self.memory_threshold, self.budget = memory_threshold, budget
        self.device = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
        self._used = used or (lambda: bytes_in_use(self.device))
        check_keep(keep)
        self._keep = keep
        self._costs, self._blocks = {}, 0  # block → bytes that it kept the last time; None: a call by hand
        self.recomputed = []

    def apply(self, blocks: Sequence[torch.nn.Module]) -> Recomputing:
        """Decide for each of `blocks`, in this order, in every forward from now on. Returns self."""
        self._blocks = len(blocks)
        for index, block in enumerate(blocks):
            self.add(block, how=partial(self._decide, index))
        return self

    def __call__(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._decide(None, fn, *args, **kwargs)

    @property
    def limit(self) -> float:
        """Return the bytes that may be in use while blocks run: memory_threshold · budget."""
        return self.memory_threshold * (capacity(self.device) if self.budget is None else self.budget)

    def _decide(self, index, fn, /, *args, **kwargs):
        if not torch.is_grad_enabled():  # without a graph a block keeps nothing
            return fn(*args, **kwargs)
        if torch.compiler.is_compiling():  # a graph would repeat one decision
            return outside_of_graph(self._decide, index, fn, *args, **kwargs)
        before, left = self._used(), 1 if index is None else self._blocks - index
        cost = self._costs.get(index, max(self._costs.values(), default=0))  # never kept: as much as the largest known
        whole = before + left * cost <= self.limit
        outputs = fn(*args, **kwargs) if whole else checkpointed(fn, args, kwargs, keep=self._keep)
        if whole:
            self._costs[index] = max(0, self._used() - before)  # a CPU's resident memory may fall meanwhile
        self.recomputed = [*(self.recomputed if index else []), not whole]  # block 0 begins a new forward
        return outputs


def capacity(device):
    """Return the bytes that this process can have on the device."""
    if device.type == "cuda":
        # what PyTorch has reserved is this process's own, free or not
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return psutil.virtual_memory().total


def bytes_in_use(device):
    """Return the bytes of tensors on a CUDA device; on a CPU the resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss
