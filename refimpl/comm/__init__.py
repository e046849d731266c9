"""Real ranks from a notebook's cell, and collectives that count their bytes."""

from .communicator import Communicator
from .errors import CollectiveMismatch, RankError
from .fake import FakeCommunicator
from .handle import Handle
from .launch import launch
from .ring import ring_all_reduce
from .traffic import COLLECTIVES, Traffic, ring_traffic

__all__ = [
    "COLLECTIVES", "CollectiveMismatch", "Communicator", "FakeCommunicator", "Handle", "RankError", "Traffic",
    "launch", "ring_all_reduce", "ring_traffic",
]
