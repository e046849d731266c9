from .autocasting import autocast
from .recompute import keep_precision
from .scaler import AdaptiveLossScaler
from .optimizer import MixedPrecisionOptimizer
