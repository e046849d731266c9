"""What depends on numbers, on a device that has none: sizes are refused by name, single numbers are counted.

How long `x.nonzero()` is depends on what is in x. So does `x[mask]`, `masked_select` and `unique`: there is no size to
rehearse. `x.item()` reads one number: it is whatever lay there, which matters only if the script decides by it.
"""

import traceback
import warnings
from collections import Counter

import torch

SIZED = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave.Tensor")
PATIENCE = 10_000  # numbers read since the last step of an optimizer, after which a loop is taken to wait for one


class NeedsNumbers(RuntimeError):
    """Says which operation cannot be rehearsed without numbers."""


class Watch:
    """A context in which operations of CUDA that depend on numbers are refused, or counted by the line that asks.

    `read`: {"train.py:12": how often a number was read there}. `stepped()` is told of an optimizer's step.
    """

    def __init__(self):
        self.read, self._since = Counter(), 0

    def stepped(self):
        self._since = 0

    def __enter__(self):
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that kernels of PyTorch's are overridden
            for name in SIZED:
                self._library.impl(name, self._refusing(name), "CUDA", allow_override=True)
            self._library.impl("_local_scalar_dense", self._item, "CUDA", allow_override=True)
        return self

    def __exit__(self, *exception):
        self._library._destroy()

    @staticmethod
    def _refusing(name):
        def refuse(*args, **kwargs):
            plain = name.strip("_2").partition(".")[0]
            raise NeedsNumbers(f"{plain} of a tensor on a device that computes nothing: the size of what it returns "
                               "depends on numbers; --numbers computes them")
        return refuse

    def _item(self, x):
        self.read[caller()] += 1
        self._since += 1
        if self._since > PATIENCE:
            raise NeedsNumbers(f"{self._since:,} numbers were read since the last step, the last at {caller()}: the "
                               "script seems to wait for one, and a device that computes nothing has none; --numbers "
                               "computes them")
        return x.cpu().view(-1)[0].item()


def caller():
    """Return the line of a user's file that is running, as "train.py:12"; of the innermost that is in no library."""
    for frame in reversed(traceback.extract_stack()):
        if "site-packages" not in frame.filename and "refimpl" not in frame.filename and "<" not in frame.filename:
            return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
    return "?"
