"""SiLU that keeps its input alone: a toy, which shows where the parts of a technique stand.

Order of reading: `papers/NAME` (the idea in one screen), then
`NAME` (what users call) and `closed_forms` (the bytes).
"""

from .closed_forms import plain_saved_bytes, saved_bytes
from .NAME import silu

__all__ = ["plain_saved_bytes", "saved_bytes", "silu"]
