"""Mixed precision, from scratch: low-precision operations, a loss scale, fp32 master weights, a dtype for each part.

Each works by itself, on the model, the optimizer or the loss that you give it. Read `papers/mixed_precision` (the idea
in one screen), then `autocasting` (with the tables of `internals/lists`), then `scaler`, `masters` and `optimizer`,
then `precision_plan`; `activations` predicts what autocast saves. `internals/` is machinery: kernels below Python, the
state of a thread, checks.
"""

from .activations import autocast_activation_bytes, autocast_activation_terms, weight_cast_bytes
from .autocasting import autocast
from .internals.recompute import keep_precision
from .masters import step_bytes
from .optimizer import MixedPrecisionOptimizer
from .precision_plan import DynamicPrecisionModel, plan_bytes, precision_context
from .scaler import AdaptiveLossScaler

__all__ = [
    "AdaptiveLossScaler", "DynamicPrecisionModel", "MixedPrecisionOptimizer", "autocast",
    "autocast_activation_bytes", "autocast_activation_terms", "keep_precision", "plan_bytes", "precision_context",
    "step_bytes", "weight_cast_bytes",
]
