"""What outlives its step: bytes that grow from step to step, and who holds them, in the script's own names."""

from .growth import Held, StepEnds
from .holders import Holder, Holders, tensors_there

__all__ = ["Held", "Holder", "Holders", "StepEnds", "tensors_there"]
