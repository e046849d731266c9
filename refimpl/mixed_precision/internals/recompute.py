"""Checkpointed functions run twice, the second time in backward, after the region has ended: it is opened again.

`torch.utils.checkpoint` restores `torch.autocast`, which it knows, and not us. While a region is open anywhere, two of
its functions are wrapped: those that take what will be recomputed. The techniques of this project recompute in a
`common.rerun.Environment`. For any other, and for a thread, wrap the function by hand: `keep_precision(function)`.
"""

import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.utils.checkpoint

from ...common import rerun
from .autocast_regions import AutocastRegion, set_stack, state

_lock = threading.Lock()
_open = 0  # regions, over all threads
_installed = ExitStack()


@rerun.register
def regions_of_now():
    """Return a function that makes a context with the autocast regions that are open now.

    Casts of weights made in it last until its end.
    """
    then = state().stack  # as it is in the forward
    return lambda: _reopened(then)


@contextmanager
def _reopened(then):
    now = state().stack
    set_stack([AutocastRegion(r.owner, r.device_type, r.dtype, None if r.casts is None else {}) for r in then])
    try:
        yield
    finally:
        set_stack(now)


def keep_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it runs in the autocast regions that are open now, at any time and in any thread.

    Casts of weights made in such a run last until its end.
    """
    regions = regions_of_now()

    @functools.wraps(function, updated=())
    def kept(*args, **kwargs):
        with regions():
            return function(*args, **kwargs)

    return kept


def region_opened():
    """Count a region; the first one installs the wrappers."""
    global _open
    with _lock:
        _open += 1
        if _open == 1:
            _install()


def region_closed():
    """Count it out; the last one removes the wrappers."""
    global _open
    with _lock:
        _open -= 1
        if _open == 0:
            _installed.close()


def _install():
    checkpoint = torch.utils.checkpoint
    reentrant, frame = checkpoint.CheckpointFunction, checkpoint._CheckpointFrame  # both of PyTorch's ways to recompute
    forward, init = reentrant.__dict__["forward"], frame.__init__

    @staticmethod
    @functools.wraps(forward.__func__)
    def forward_keeping(ctx, run_function, *args):
        return forward.__func__(ctx, keep_precision(run_function), *args)

    @functools.wraps(init)
    def init_keeping(self, recompute_fn, *args, **kwargs):
        init(self, keep_precision(recompute_fn), *args, **kwargs)

    reentrant.forward, frame.__init__ = forward_keeping, init_keeping
    _installed.callback(setattr, reentrant, "forward", forward)
    _installed.callback(setattr, frame, "__init__", init)
