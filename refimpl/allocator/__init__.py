"""The allocator: why memory is free and a request fails, what is reserved, and what the settings do.

Order of reading: `paper` (a caching allocator in one screen); `settings`, `blocks`, `caching` (PyTorch's, rule by
rule), `expandable`, `device`; `holes` and `pool` (first fit and best fit on real tensors); `trace`, `replay`;
`snapshot`, `rewind`, `recorded` (PyTorch's own recordings, read and replayed), `record` (written),
`drawing`.
"""

from .caching import CachingAllocator
from .device import OutOfMemory
from .drawing import segment_map
from .pool import GPUMemoryPool, PoolExhausted
from .record import record
from .recorded import compare
from .replay import explain, replay
from .rewind import capacity_of, trace_of
from .settings import Settings
from .snapshot import Snapshot
from .trace import AllocationTrace, DamagedTrace

__all__ = [
    "AllocationTrace", "CachingAllocator", "DamagedTrace", "GPUMemoryPool", "OutOfMemory", "PoolExhausted", "Settings",
    "Snapshot", "capacity_of", "compare", "explain", "record", "replay",
    "segment_map", "trace_of",
]
