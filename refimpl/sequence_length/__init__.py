"""Long sequences: how long a sequence can be within a budget of bytes, and how to train on one in chunks.

Read in this order: `papers/sequence_length` (chunks, the idea in one screen), then `common/quadratic` (bytes as a·s² +
b·s + c), `longest` (the longest sequence of any model, by dry runs), `chunked` (keys and values carried from chunk to
chunk), and `carried_keys`, which `chunked` rests on.
"""

from ..common.quadratic import Quadratic
from ..common.step_bytes import training_step_bytes
from .carried_keys import carried_bytes, chunked_step_bytes
from .chunked import ChunkedSequenceProcessor
from .longest import LongestSequence, longest_sequence

__all__ = [
    "ChunkedSequenceProcessor", "LongestSequence", "Quadratic", "carried_bytes", "chunked_step_bytes",
    "longest_sequence", "training_step_bytes",
]
