"""Operations whose kernels are known to take workspaces: memory for themselves, which no tracker sees.

Known from the CPU's allocator, read beside the tracker in training steps of transformers and timm (oneDNN's
convolutions took up to 78 % of a peak) and over PyTorch's own samples of every operation, and from cuDNN's and cuBLAS'
documentation.
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
# Operations whose kernels take workspaces in any case, on a CPU.
_ALWAYS = frozenset("""
    _chunk_cat _ctc_loss _ctc_loss_backward _fft_c2c _fft_c2r _fft_r2c histc isin isinf kthvalue linalg_eig
    _linalg_eigh linalg_inv_ex linalg_matrix_exp linalg_pinv _linalg_svd logsumexp masked_select mkldnn_rnn_layer
    mkldnn_rnn_layer_backward native_dropout_backward _native_multi_head_attention sort
    _transformer_encoder_layer_fwd _unsafe_masked_index _unsafe_masked_index_put_accumulate _upsample_bilinear2d_aa
    _upsample_bilinear2d_aa_backward""".split())
# Those whose kernels copy what is not contiguous, such as the gradient of a sum, or an image with channels last.
_COPYING = frozenset("""
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _cdist_forward _cdist_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool2d_backward adaptive_max_pool3d adaptive_max_pool3d_backward avg_pool2d
    avg_pool2d_backward avg_pool3d avg_pool3d_backward binary_cross_entropy_with_logits channel_shuffle
    embedding_dense_backward fractional_max_pool2d fractional_max_pool2d_backward fractional_max_pool3d
    fractional_max_pool3d_backward gelu gelu_backward grid_sampler_2d_backward grid_sampler_3d_backward
    max_pool3d_with_indices max_pool3d_with_indices_backward multilabel_margin_loss_forward
    multilabel_margin_loss_backward native_batch_norm_backward reflection_pad1d reflection_pad2d replication_pad1d
    replication_pad2d replication_pad2d_backward replication_pad3d replication_pad3d_backward
    soft_margin_loss_backward upsample_bicubic2d_backward upsample_nearest2d_backward upsample_nearest3d_backward
    upsample_trilinear3d_backward""".split())
_HOW = {
    "cpu": "memory.with_workspaces(t, m) adds them after a step under memory.track(…) as t, memory.measure('cpu') as m",
    "cuda": "memory.measure(\"cuda\") has them in its peak",
}


def may_take(func):
    """Tell whether kernels of `func` are known to take workspaces."""
    return func in _TAKING or _name(func) in _ALWAYS or _name(func) in _COPYING


def _name(func):
    return func._schema.name.partition("::")[2] if hasattr(func, "_schema") else ""  # torch.cond has none


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
    if func not in _TAKING:
        given = [each for each in args if isinstance(each, torch.Tensor) and each.layout is torch.strided]
        on_cpu = all(each.is_cpu for each in given)
        return on_cpu and (_name(func) in _ALWAYS or not all(each.is_contiguous() for each in given))
    limit = _TAKING[func]
    first = next(iter(outputs), None) if isinstance(outputs, (tuple, list)) else outputs
    return first is None or first.element_size() <= limit


def note_of(names, device):
    """Return the sentence about the workspaces of these operations on `device`."""
    how = _HOW.get(device.partition(":")[0], "memory.measure reads them")
    return f"{NOT_COUNTED} that kernels take inside {', '.join(sorted(names))}; {how}"
