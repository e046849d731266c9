"""The allocator: why memory is free and a request fails, what is reserved, and what the settings do.

Order of reading: `papers/caching_allocator` (a caching allocator in one screen); `settings`, `blocks`, `caching`
(PyTorch's, rule by rule), `expandable`, `device`; `holes` and `pool` (first fit and best fit on real tensors);
`free_list` says which hole; `common/allocations` (a trace), `replaying`; `snapshot`, `recording_start`,
`recording_comparison` (PyTorch's own recordings, read and replayed), `simulated_snapshot` (written), `drawing`;
`papers/static_plan` (a static plan in one screen), `static` (plans, an arena that runs a step); `defragment`,
`contiguous_region` (against holes: moving what is live, and keeping apart what lives long).
"""

from typing import TYPE_CHECKING

from ..common.allocations import AllocationTrace, DamagedTrace
from ..common.lazy import lazily
from .caching import CachingAllocator
from .defragment import defragment
from .device import OutOfMemory
from .pool import GPUMemoryPool, PoolExhausted
from .recording_comparison import compare
from .recording_start import capacity_of, trace_of
from .replaying import explain, replay
from .settings import Settings
from .simulated_snapshot import record
from .snapshot import Snapshot
from .static import (
    ActivationReuseOptimizer,
    OverlappingPlan,
    StaticPlan,
    execute,
    plan_static,
    record_step,
    without_out,
)

if TYPE_CHECKING:
    from .drawing import segment_map

__getattr__, __dir__ = lazily(__name__, {".drawing": "segment_map"})
__all__ = [
    "ActivationReuseOptimizer", "AllocationTrace", "CachingAllocator", "DamagedTrace", "GPUMemoryPool", "OutOfMemory",
    "OverlappingPlan", "PoolExhausted", "Settings", "Snapshot", "StaticPlan", "capacity_of", "compare", "defragment",
    "execute", "explain", "plan_static", "record", "record_step", "replay", "segment_map", "trace_of", "without_out",
]
