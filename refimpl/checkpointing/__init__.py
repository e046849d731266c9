"""Recomputation: keep less in the forward, compute it again in backward."""

from .reentrant import reentrant_checkpoint
from .region import RecomputeError, checkpoint
from .statistics import frozen_statistics

__all__ = ["RecomputeError", "checkpoint", "frozen_statistics", "reentrant_checkpoint"]
