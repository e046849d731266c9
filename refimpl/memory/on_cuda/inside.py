"""What CUDA's kernels take and give back inside an operation, in bytes, as PyTorch's allocator counts them.

Each is a function (gpu, *arguments of the operation) that returns a tuple, a size for each tensor taken. Read off the
allocator for every operation of the steps of transformers, and for those of PyTorch's own list of operations; the sizes
are those of the launchers (Reduce.cuh, EmbeddingBackwardKernel.cu, SoftMax.cu, and `attention.py`). Small ones, and
those of sorts and indexing, are left out.
"""

import math

import torch

from . import attention

aten = torch.ops.aten
FP32, INDEX = 4, 8
# Threads of a processor at once, where they are not 2,048.
THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


def copies(count):
    """Make the function of a kernel that copies what is not contiguous among its first `count` arguments."""
    return lambda gpu, *args: tuple(x.nbytes for x in args[:count] if not x.is_contiguous())


def elements(others=0):
    """Make the function of a loss whose mean or sum is taken of a tensor with the loss of each element; and of as many
    `others`, whatever is taken of them."""

    def taken(gpu, x, target, *rest):
        reduced = next((each for each in rest if type(each) is int), 1) != 0
        nbytes = math.prod(torch.broadcast_shapes(x.shape, target.shape)) * x.element_size()
        return (nbytes,) * (reduced + others)

    return taken


def upsampling_backward(gpu, d_out, *rest):
    """Return a copy of the gradient, unless its order of dimensions is one of the two that images have."""
    orders = (torch.contiguous_format, torch.channels_last)
    return () if any(d_out.is_contiguous(memory_format=each) for each in orders) else (d_out.nbytes,)


def soft_margin_backward(gpu, d_out, x, *rest):
    """Return exp(−y · x), and 1 + exp(−y · x)."""
    return x.nbytes, x.nbytes


def logsumexp(gpu, x, dims, *rest):
    """Return exp(x − m), and m."""
    return x.nbytes, x.nbytes // max(math.prod(x.shape[dim] for dim in dims), 1)


def softmax_backward(gpu, d_out, out, *rest):
    """Return dO · O."""
    return (max(d_out.nbytes, out.nbytes),)


def safe_softmax(gpu, x, *rest):
    """Return booleans: which scores are −inf, and which rows are −inf throughout."""
    return x.numel(), x.numel() // max(x.shape[-1:], default=1), FP32


def embedding_backward(gpu, d_out, indices, rows, *rest):
    """Return, for more than 3,072 tokens, their order, and fp32 sums of each ten tokens of one row."""
    tokens, width = indices.numel(), d_out.shape[-1]
    if tokens <= 3072:
        return ()
    segments = min(tokens, rows)
    sums = tokens // 10 + segments
    order = [INDEX * n for n in (tokens, tokens, tokens, segments, segments, 2, sums)]
    return *order, sums * -(-width // 32) * 32 * FP32


def reduction(gpu, x, dims=None, *rest):
    """Return what a sum or a mean along the first dimensions takes: fp32 numbers of each block of threads; small
    integers are first cast to int64."""
    counted = (INDEX * x.numel(),) if not x.is_floating_point() and x.element_size() < INDEX else ()
    return *counted, *parts(gpu, x, dims, INDEX if counted else FP32)


def along(nbytes=None):
    """Make the function of another reduction along the first dimensions: blocks of threads leave numbers of `nbytes`,
    by default as wide as the tensor's."""
    def taken(gpu, x, dims=None, *rest):
        return parts(gpu, x, [dims] if isinstance(dims, int) else dims, nbytes or x.element_size())

    return taken


def norm(gpu, x, power=2, dims=None, *rest):
    """Return what `reduction` does; the first argument is the norm's power."""
    return parts(gpu, x, dims, FP32)


def parts(gpu, x, dims, nbytes):
    """Return what blocks of threads leave for each other, in numbers of `nbytes`, and counters of finished blocks."""
    kept = math.prod(x.shape)
    reduced = range(x.ndim) if not dims else sorted(dim % x.ndim for dim in dims)
    inputs = math.prod(x.shape[dim] for dim in reduced)
    if not x.numel() or not x.is_contiguous() or (x.ndim - 1) in reduced or inputs == 1:
        return ()
    outputs = kept // inputs
    vector = next(n for n in (4, 2, 1) if outputs % n == 0)
    across, most = outputs // vector, 512 // vector
    width = min(_power(across, most), 32)
    height = min(_power(inputs, most), most // width)
    width = min(_power(across, most), most // height)
    each = inputs  # of a thread
    if each >= 16 * height or each >= 256:
        each = -(-inputs // height)
    else:
        across = -(-across // height)
    grid, target = -(-across // width), gpu.processors * (THREADS.get(tuple(gpu.capability), 2048) // (width * height))
    if each < 256 or grid > target:
        return ()
    blocks = max(min(-(-target // grid), -(-each // 16)), -(-each // 256))
    return () if blocks == 1 else (outputs * blocks * width * vector * nbytes, grid * FP32)


def _power(n, most):
    return 2 ** int(math.log2(min(n, most)))


INSIDE = {
    aten._softmax.default: copies(1),
    aten._log_softmax.default: copies(1),
    aten._log_softmax_backward_data.default: copies(2),
    aten.native_layer_norm.default: copies(1),
    aten.native_layer_norm_backward.default: copies(2),
    aten._fused_rms_norm.default: copies(1),
    aten._fused_rms_norm_backward.default: copies(2),
    aten.upsample_bilinear2d_backward.default: upsampling_backward,
    aten.binary_cross_entropy_with_logits.default: elements(others=1),
    aten.soft_margin_loss_backward.default: soft_margin_backward,
    aten.mse_loss.default: elements(),
    aten.smooth_l1_loss.default: elements(),
    aten.huber_loss.default: elements(),
    aten.logsumexp.default: logsumexp,
    aten._softmax_backward_data.default: softmax_backward,
    aten._safe_softmax.default: safe_softmax,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.sum.default: reduction,
    aten.sum.dim_IntList: reduction,
    aten.linalg_vector_norm.default: norm,
    aten.prod.dim_int: along(FP32),
    **dict.fromkeys((aten.amax.default, aten.amin.default), along()),
    **dict.fromkeys((aten.var.correction, aten.std.correction), along(16)),  # mean, squares, two counts
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim), along(16)),  # and its place
    aten.mean.dim: reduction,
    aten._scaled_dot_product_flash_attention.default: attention.inside_flash,
    aten._scaled_dot_product_flash_attention_backward.default: attention.inside_flash_backward,
    aten._scaled_dot_product_efficient_attention.default: attention.inside_efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: attention.inside_efficient_backward,
}
