"""Recomputation: keep less in the forward, compute it again in backward."""

from .chain import PlannedBlocks, checkpoint_sequential, run_chain, segments_plan
from .policies import DynamicCheckpoint, Recomputing, recompute, selective
from .profile import profile_chain
from .reentrant import reentrant_checkpoint
from .region import RecomputeError, checkpoint
from .schedule import Costs, Schedule, costs, optimal_schedule, plan_peak, plan_time, time_peak_curve
from .statistics import frozen_statistics

__all__ = [
    "Costs", "DynamicCheckpoint", "PlannedBlocks", "RecomputeError", "Recomputing", "Schedule", "checkpoint",
    "checkpoint_sequential", "costs", "frozen_statistics", "optimal_schedule", "plan_peak", "plan_time",
    "profile_chain", "recompute", "reentrant_checkpoint", "run_chain", "segments_plan", "selective", "time_peak_curve",
]
