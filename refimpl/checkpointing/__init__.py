"""Recomputation: keep less in the forward, compute it again in backward.

Read `papers/recomputation` (the idea in one screen), then `reentrant` (its function alone, and what it cannot do),
`region` (`checkpoint`, on saved-tensor hooks), `save_list` (keep the results of some operations); then what to
recompute: `chain` (plans and segments), `schedule` (the best plan for a budget), `policies` and `adaptive` (from
outside a model). `closed_forms` predicts bytes and FLOPs, `profile` measures them, `figure` draws, `statistics` is for
BatchNorm.
"""

from .adaptive import AdaptiveCheckpoint
from .chain import PlannedBlocks, checkpoint_sequential, planned, run_chain, segments_plan
from .closed_forms import block_flops, extra_flops, gpt_costs, gpt_peak_bytes, kept_bytes
from .policies import DynamicCheckpoint, Recomputing, recompute, return_on_time, selective
from .profile import profile_chain
from .reentrant import reentrant_checkpoint
from .region import RecomputeError, checkpoint
from .schedule import Costs, Schedule, costs, optimal_schedule, plan_peak, plan_time, time_peak_curve
from .statistics import frozen_statistics

__all__ = [
    "AdaptiveCheckpoint", "Costs", "DynamicCheckpoint", "PlannedBlocks", "RecomputeError", "Recomputing", "Schedule",
    "block_flops", "checkpoint", "checkpoint_sequential", "costs", "extra_flops", "frozen_statistics", "gpt_costs",
    "gpt_peak_bytes", "kept_bytes", "optimal_schedule", "plan_peak", "plan_time", "planned", "profile_chain",
    "recompute", "reentrant_checkpoint", "return_on_time", "run_chain", "segments_plan", "selective", "time_peak_curve",
]
