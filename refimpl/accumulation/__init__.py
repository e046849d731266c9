"""One large batch as several small ones: the same gradient, the activations of one micro-batch."""

from .accumulate import accumulate, accumulation_bytes
from .batches import count_targets, split
from .find import MicroBatch, find_micro_batch
from .ranks import accumulation_traffic

__all__ = [
    "MicroBatch", "accumulate", "accumulation_bytes", "accumulation_traffic", "count_targets", "find_micro_batch",
    "split",
]
