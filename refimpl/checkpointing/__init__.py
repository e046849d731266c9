"""Recomputation: keep less in the forward, compute it again in backward."""

from .reentrant import reentrant_checkpoint
from .region import RecomputeError, checkpoint

__all__ = ["RecomputeError", "checkpoint", "reentrant_checkpoint"]
