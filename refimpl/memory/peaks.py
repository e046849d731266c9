"""Peaks of each step or phase, beside those that a script itself reads and resets: PyTorch has one peak for both."""

import contextlib
import functools
from unittest import mock

import torch

READS = ("_cuda_memoryStats", "_accelerator_getDeviceStats")  # behind torch.cuda.* and torch.accelerator.*
RESETS = ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats")


class Peaks(contextlib.ExitStack):
    """A context in which a script's readings are those since its own resets, and ours those since our last one."""

    def __enter__(self):
        self._script, self._step = {}, {}  # device → what its peaks were before the other's reset
        self._stats, self._reset = (getattr(torch._C, each[0], None) for each in (READS, RESETS))  # None on CPU builds
        mine = dict.fromkeys(READS, self._of_the_script) | dict.fromkeys(RESETS, self._reset_by_the_script)
        for name in filter(functools.partial(hasattr, torch._C), mine):
            self.enter_context(mock.patch.object(torch._C, name, mine[name]))
        return self

    def since_the_last(self, devices=None):
        """Return what the device took that took most, of all or of some indices: peaks since the last call,
        "allocated", "requested" and "reserved", and what is allocated "now", in bytes; "device" is its index."""
        torch.cuda.init()  # not before: then PyTorch reads its settings, which a script may write
        found = []
        for device in range(torch.cuda.device_count()) if devices is None else devices:
            stats = self._stats(device)
            ours, self._script[device] = (_highest(stats, kept.get(device, {})) for kept in (self._step, self._script))
            self._step.pop(device, None)
            self._reset(device)
            found.append({name: ours[f"{name}_bytes"]["all"]["peak"] for name in ("allocated", "requested", "reserved")}
                         | {"now": stats["allocated_bytes"]["all"]["current"], "device": device})
        return max(found, key=lambda each: each["reserved"])

    def _of_the_script(self, device):
        return _highest(self._stats(device), self._script.get(device, {}))

    def _reset_by_the_script(self, device):
        self._step[device] = _highest(self._stats(device), self._step.get(device, {}))
        self._script.pop(device, None)
        self._reset(device)


def _highest(stats, kept):
    """Return PyTorch's nested statistics with each peak at least as high as in `kept`."""
    return {key: _highest(value, kept.get(key, {})) if isinstance(value, dict) else
            max(value, kept.get("peak", 0)) if key == "peak" else value for key, value in stats.items()}
