"""Attention in tiles as one operator with a shape rule, in a dry run.

On fake tensors a tile computes nothing, and thousands of them take their time. What a tile takes in memory follows
from its shape. So a dry run goes through one tile of each shape, with a tracker around, and notes what that took at its
peak. The next call of these shapes takes as much at once, and gives it back.
"""

import torch

from ...common.nested_tensors import is_dry

_taken = {}  # what is computed, on which shapes -> bytes at the peak, above its arguments


def in_tiles(kind, tensors, options, compute):
    """Call `compute(is_new)`, which runs those tiles of which `is_new(shape)` is True, and writes to some of `tensors`.

    That is each of them; in a dry run one of each shape, or none if such a call, of this `kind` and with these
    `options` (hashable), has been before.
    """
    like = tensors[0]
    if not is_dry(like):
        compute(lambda shape: True)
        return
    key = kind, options, *((tuple(x.shape), x.stride(), x.dtype, x.device) for x in tensors)
    if key in _taken:
        torch.empty(_taken[key], dtype=torch.uint8, device=like.device)  # freed at once: a peak, and nothing kept
        return
    from ...memory import track  # a real call never loads the meter

    seen = set()
    with track(*tensors) as tracker:
        compute(lambda shape: not (shape in seen or seen.add(shape)))
    _taken[key] = tracker.peak.total - tracker.now.total  # the arguments are in both
