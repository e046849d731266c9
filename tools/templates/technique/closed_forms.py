"""Bytes that autograd keeps of SiLU, of n numbers with b bytes each:

    x * sigmoid(x)      2 · n · b     x and σ(x)
    here                    n · b     x
"""

import math


def saved_bytes(shape, dtype):
    """Return the bytes that `silu` keeps of an input of this shape and dtype until backward."""
    return math.prod(shape) * dtype.itemsize


def plain_saved_bytes(shape, dtype):
    """Return the bytes that `x * sigmoid(x)` keeps."""
    return 2 * saved_bytes(shape, dtype)
