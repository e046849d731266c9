"""Gradient accumulation: the gradient of a large batch with the activations of one micro-batch.

Read in this order: `papers/accumulation` (the idea in one screen), then `micro_batches` (how a batch is cut, and
how its parts are weighted), `accumulate`, `gradient_sums` (low-precision gradients summed in fp32),
`gradient_reduction` (several processes, one reduction per step), and `find` (the largest micro-batch that fits).
"""

from .accumulate import accumulate, accumulation_bytes
from .find import MicroBatch, find_micro_batch
from .gradient_reduction import Engine, accumulation_traffic, engine_traffic
from .micro_batches import count_targets, split

__all__ = [
    "Engine", "MicroBatch", "accumulate", "accumulation_bytes", "accumulation_traffic", "count_targets",
    "engine_traffic", "find_micro_batch", "split",
]
