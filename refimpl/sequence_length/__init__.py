"""Long sequences: how long one can be, and one fed in chunks."""

from .longest import LongestSequence, longest_sequence, training_step_bytes
from .polynomial import Quadratic

__all__ = ["LongestSequence", "Quadratic", "longest_sequence", "training_step_bytes"]
