"""Long sequences: how long one can be, and one fed in chunks."""

from .cache import carried_bytes
from .chunked import ChunkedSequenceProcessor
from .longest import LongestSequence, longest_sequence, training_step_bytes
from .polynomial import Quadratic

__all__ = [
    "ChunkedSequenceProcessor", "LongestSequence", "Quadratic", "carried_bytes", "longest_sequence",
    "training_step_bytes",
]
