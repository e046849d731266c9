"""Exercises of the page NAME."""

import torch

from refimpl import memory
from refimpl.NAME import silu

from . import exercise

HINTS = {"first": ["Only x waits for backward. How many numbers has it?",
                   "The product of the shape's sizes, times `dtype.itemsize`."]}


@exercise("bytes", int)
def first(predict):
    """Grade `predict(shape, dtype)`, which returns the bytes that `silu` keeps until backward of an x."""
    for shape, dtype in (((64, 32), torch.float32), ((3, 5, 7), torch.float32), ((64, 32), torch.bfloat16)):
        leaf = torch.ones(shape, dtype=dtype, requires_grad=True)
        with memory.track(leaf) as t:
            y = silu(leaf * 1)
            kept = t.now.total - t.start.total - y.nbytes
        said = predict(shape, dtype)
        if said != kept:
            return f"{shape} in {dtype}: you say {said:,}, {kept:,} bytes are kept"
    return None
