"""Long sequences: how long one can be, and one fed in chunks.

To read in this order: `polynomial` (bytes as a·s² + b·s + c), `longest` (any model, by dry runs), `chunked` (keys and
values carried from chunk to chunk), and under it `cache`.
"""

from ..memory import training_step_bytes
from .cache import carried_bytes, chunked_step_bytes
from .chunked import ChunkedSequenceProcessor
from .longest import LongestSequence, longest_sequence
from .polynomial import Quadratic

__all__ = [
    "ChunkedSequenceProcessor", "LongestSequence", "Quadratic", "carried_bytes", "chunked_step_bytes",
    "longest_sequence", "training_step_bytes",
]
