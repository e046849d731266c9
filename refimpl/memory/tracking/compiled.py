"""Compiled code under a tracker: it runs as compiled, and its buffers are reported.

The code that inductor writes makes its buffers by functions of its own, which are no operations; all else that it
calls is, but for its own kernels, which take nothing.
"""

import functools
import sys
import warnings
from contextlib import contextmanager

import torch

_NAMES = ("empty_strided_cpu", "empty_strided_cuda")


@contextmanager
def heard(report):
    """Call `report(name, tensor)` for each buffer of code that is compiled inside, or was before."""
    guards, wrapped = torch._C._dynamo.guards, {}
    with _without_warning():
        for name in _NAMES:
            original = getattr(guards, f"_{name}")
            wrapped[name] = original, functools.partial(_make, report, name, original)
            _replace(name, *wrapped[name])
        try:
            yield
        finally:
            for name, (original, ours) in wrapped.items():
                _replace(name, ours, original)


def _make(report, name, original, *args):
    tensor = original(*args)
    report(name, tensor)
    return tensor


def _replace(name, old, new):
    """Let every module that inductor wrote, those of later too, call `new` for `old`."""
    setattr(torch._C._dynamo.guards, f"_{name}", new)
    codecache = sys.modules.get("torch._inductor.codecache")
    for module in codecache.PyCodeCache.modules if codecache else ():
        if getattr(module, name, None) is old:
            setattr(module, name, new)


@contextmanager
def _without_warning():
    """Silence a warning: hooks on modules that a tracker installs may run twice for a compiled module."""
    warnings.filterwarnings("ignore", "Using `torch.compile\\(module\\)` when there are global hooks")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        if ours in warnings.filters:
            warnings.filters.remove(ours)
