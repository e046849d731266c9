"""Operations whose kernels are known to take workspaces: memory for themselves, which no tracker sees.

Known from the CPU's allocator, read beside the tracker in training steps of transformers and timm (oneDNN's
convolutions took up to 78 % of a peak), and from cuDNN's and cuBLAS' documentation.
"""

import functools
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..on_cuda.inside import INSIDE

aten = torch.ops.aten
NOT_COUNTED = "not counted: workspaces"
WORKSPACE = "kernel workspace"  # a category
# operation -> the largest element, in bytes, with which its kernels take workspaces worth a word
_TAKING = dict.fromkeys((aten.convolution.default, aten.convolution_backward.default, aten.upsample_bilinear2d.default,
                         aten.upsample_bilinear2d_backward.default), 8)
_TAKING |= dict.fromkeys((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default), 2)
# Operation -> how many first arguments its kernels copy where they are not contiguous, as an image with channels last.
_COPYING = {aten._softmax.default: 1, aten._log_softmax.default: 1, aten._softmax_backward_data.default: 2,
            aten._log_softmax_backward_data.default: 2}
_HOW = {
    "cpu": "memory.with_workspaces(t, m) adds them after a step under memory.track(…) as t, memory.measure('cpu') as m",
    "cuda": "memory.measure(\"cuda\") has them in its peak",
}


def may_take(func):
    """Tell whether kernels of `func` are known to take workspaces."""
    return func in _TAKING or func in _COPYING


def inside_on_cuda(func):
    """Return a function (gpu, arguments of `func`), which says what CUDA takes inside; None if nothing is known."""
    return INSIDE.get(func)


class Processors(NamedTuple):
    """What kernels ask of a GPU."""

    capability: tuple
    processors: int


@functools.cache
def _processors(index):
    properties = torch.cuda.get_device_properties(index)
    return Processors((properties.major, properties.minor), properties.multi_processor_count)


def gpu_of(tensor):
    """Return the GPU of a tensor, as a Processors or a Hardware: that of a dry run, or its own; None on a CPU."""
    if type(tensor) is FakeTensor:
        return getattr(tensor.fake_mode, "gpu", None)
    return _processors(tensor.device.index) if tensor.is_cuda else None


def takes_workspace(func, args, outputs):
    """Tell whether those for such arguments and outputs are."""
    if func in _COPYING:
        return not all(each.is_contiguous() for each in args[:_COPYING[func]])
    limit = _TAKING[func]
    first = next(iter(outputs), None) if isinstance(outputs, (tuple, list)) else outputs
    return first is None or first.element_size() <= limit


def note_of(names, device):
    """Return the sentence about the workspaces of these operations on `device`."""
    how = _HOW.get(device.partition(":")[0], "memory.measure reads them")
    return f"{NOT_COUNTED} that kernels take inside {', '.join(sorted(names))}; {how}"
