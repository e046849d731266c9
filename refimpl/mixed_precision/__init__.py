from .autocasting import autocast
from .recompute import keep_precision
