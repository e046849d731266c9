"""What depends on numbers, on a device that has none: sizes are refused by name, single numbers are counted.

How long `x.nonzero()` is depends on what is in x. So does `x[mask]`, `masked_select` and `unique`: there is no size to
rehearse. `x.item()` or `x.tolist()` reads numbers: whatever lay there, which matters only if the script decides by it.
"""

import ctypes
import os
import traceback
import warnings
from collections import Counter

import torch

from .. import phantom
from ..memory.tracking.lines import users
from ..phantom import numbers

SIZED = ("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "repeat_interleave.Tensor",
         "_coalesce")
PATIENCE = 10_000  # numbers read since the last step of an optimizer, after which a loop is taken to wait for one


class NeedsNumbers(RuntimeError):
    """Says which operation cannot be rehearsed without numbers."""


class ValueGuard:
    """A context in which operations of CUDA that depend on numbers are refused, or counted by the line that asks.

    `read`: {"train.py:12": how often numbers came to the host there}. `stepped()` is told of an optimizer's step.
    """

    def __init__(self):
        self.read, self._since = Counter(), 0
        self.waits = None  # what is said of a script that reads numbers without end
        self._asked = ctypes.CFUNCTYPE(ctypes.c_int)(self._a_read)  # kept: C calls it

    def stepped(self):
        self._since = 0

    def __enter__(self):
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings(action="ignore"):  # that kernels of PyTorch's are overridden
            for name in SIZED:
                key = "SparseCUDA" if name == "_coalesce" else "CUDA"
                self._library.impl(name, self._refusing(name), key, allow_override=True)
        numbers.print_from_the_host()
        phantom.libphantom().phantom_ask_at_reads(self._asked)
        return self

    def __exit__(self, *exception):
        phantom.libphantom().phantom_ask_at_reads(None)
        self._library._destroy()  # else PyTorch's kernels stay overridden

    @staticmethod
    def _refusing(name):
        def refuse(*args, **kwargs):
            plain = name.strip("_2").partition(".")[0]
            raise NeedsNumbers(f"{plain} of a tensor on a device that computes nothing: the size of what it returns "
                               "depends on numbers; --numbers computes them")
        return refuse

    def _a_read(self):
        where = caller()
        self.read[where] += 1
        self._since += 1
        if self._since > PATIENCE:
            self.waits = (f"{self._since:,} numbers were read since the last step, the last at {where}: the script "
                          "seems to wait for one, and a device that computes nothing has none; --numbers computes them")
        return self._since > PATIENCE  # an error of CUDA's then, which PyTorch raises


def caller():
    """Return the user's line that is running, as "train.py:12": of the innermost that is in no library."""
    frame, line = users(traceback.walk_stack(None)) or (None, 0)
    return f"{os.path.basename(frame.f_code.co_filename)}:{line}" if frame else "?"
