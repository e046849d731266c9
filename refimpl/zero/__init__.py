"""ZeRO: data parallelism whose model states are shared out over the ranks, one kind of state after the other."""

from .data_parallel import DataParallel
from .manifest import CheckpointError
from .zero1 import Zero1
from .zero2 import Zero2
from .zero3 import Zero3

__all__ = ["CheckpointError", "DataParallel", "Zero1", "Zero2", "Zero3"]
