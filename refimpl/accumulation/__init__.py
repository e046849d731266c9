"""Gradient accumulation: the gradient of a large batch with the activations of one micro-batch.

Read in this order: `papers/accumulation` (the idea in one screen), then `batches` (how a batch is cut, and how its
parts are weighted), `accumulate`, `sums` (low-precision gradients summed in fp32), `ranks` (several processes, one
reduction per step), and `find` (the largest micro-batch that fits).
"""

from .accumulate import accumulate, accumulation_bytes
from .batches import count_targets, split
from .find import MicroBatch, find_micro_batch
from .ranks import Engine, accumulation_traffic, engine_traffic

__all__ = [
    "Engine", "MicroBatch", "accumulate", "accumulation_bytes", "accumulation_traffic", "count_targets",
    "engine_traffic", "find_micro_batch", "split",
]
