"""Which kernel PyTorch takes for attention on a GPU, and what each takes for itself.

The rules are those of `sdp_utils.cpp` (PyTorch 2.11 to 2.14), read off PyTorch's own choice over some 5,000 calls; the
bytes inside are those of the kernels' launchers, read off its allocator.
"""

import math

import torch
from torch.torch_version import __version__ as VERSION

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
CUDNN, FLASH, EFFICIENT, MATH = "cuDNN", "flash", "efficient", "math"


def choose(gpu, q, k, v, mask, dropout, causal, gqa):
    """Return the kernel that PyTorch takes on `gpu`, whose capability decides. q (B, H, T, D), k and v (B, G, S, D)."""
    if any(x.ndim != 4 or 0 in x.shape or x.stride(-1) != 1 for x in (q, k, v)) or len({q.dtype, k.dtype, v.dtype}) > 1:
        return MATH
    if not gqa and len({x.shape[:2] for x in (q, k, v)}) > 1:
        return MATH
    backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    cuda = torch.backends.cuda  # what `sdpa_kernel` leaves
    for kernel, can, left in ((CUDNN, _cudnn, cuda.cudnn_sdp_enabled), (FLASH, _flash, cuda.flash_sdp_enabled),
                              (EFFICIENT, _efficient, cuda.mem_efficient_sdp_enabled)):
        if left() and can(gpu.capability, q, k, v, mask, dropout, causal, gqa, backward):
            return kernel
    return MATH


def _cudnn(capability, q, k, v, mask, dropout, causal, gqa, backward):
    """Tell whether cuDNN's kernel can be taken. It comes first on two generations of datacenter GPUs."""
    if capability not in ((9, 0), (10, 0)) or q.dtype not in HALF or (mask is not None and mask.requires_grad):
        return False
    wide, narrow = max(q.shape[-1], v.shape[-1]), min(q.shape[-1], v.shape[-1])
    if wide > 256 or q.shape[-1] % 8 or v.shape[-1] % 8 or narrow < 1:
        return False
    if VERSION >= (2, 14) and backward and 128 < wide < 256:
        return False
    if dropout:
        return VERSION < (2, 13) and q.shape[2] > 1
    return q.shape[2] > 1 or capability < (10, 0)


def _flash(capability, q, k, v, mask, dropout, causal, gqa, backward):
    size = q.shape[-1]
    if capability < (8, 0) or q.dtype not in HALF or mask is not None or v.shape[-1] != size or size > 256:
        return False
    if capability in ((8, 6), (8, 9), (12, 0), (12, 1)) and backward and (192 < size <= 224 or size > 224 and dropout):
        return False  # too little shared memory
    return not (causal and q.shape[2] != k.shape[2])


def _efficient(capability, q, k, v, mask, dropout, causal, gqa, backward):
    if q.dtype not in (torch.float32, torch.float16) and (q.dtype != torch.bfloat16 or capability < (8, 0)):
        return False
    if gqa and VERSION < (2, 14) and len({x.shape[1] for x in (q, k, v)}) > 1:
        return False
    alignment = 4 if q.dtype is torch.float32 else 8
    if q.dtype is torch.float32 and capability < (8, 0):
        alignment = 1
    return q.shape[-1] % alignment == v.shape[-1] % alignment == 0


def attend(gpu, q, k, v, mask, dropout, causal, *, scale, gqa):
    """Do what `scaled_dot_product_attention` does on `gpu`. Returns (output, kernel)."""
    if VERSION >= (2, 14) and {x.ndim for x in (q, k, v)} == {3}:
        mask = mask.unsqueeze(0) if mask is not None and mask.ndim == 3 else mask
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        output, kernel = attend(gpu, q, k, v, mask, dropout, causal, scale=scale, gqa=gqa)
        return output.squeeze(0), kernel
    kernel = choose(gpu, q, k, v, mask, dropout, causal, gqa)
    if kernel is MATH:
        return aten._scaled_dot_product_attention_math(q, k, v, mask, dropout, causal, None, scale=scale,
                                                       enable_gqa=gqa)[0], kernel
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, torch.zeros((), dtype=q.dtype), torch.full((), -math.inf, dtype=q.dtype))
    keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if kernel is FLASH:
        size, scale = q.shape[-1], 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if size % 8:
            q, k, v = (torch.nn.functional.pad(x, (0, 8 - size % 8)) for x in (q, k, v))
        output = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, False, scale=scale)[0]
        return output[..., :size] if size % 8 else output, kernel
    if mask is not None:
        if kernel is EFFICIENT:
            mask = _aligned(mask)
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if kernel is CUDNN:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, keeps, dropout, causal, False,
                                                        scale=scale)[0], kernel
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, keeps, dropout, causal, scale=scale)[0], kernel


def _aligned(mask):
    """Copy rows into longer ones unless their length is a multiple of 16: the kernel reads 16 elements at a time."""
    last = mask.shape[-1]
    if last % 16 == 0:
        return mask
    return torch.nn.functional.pad(mask, (0, 16 - last % 16))[..., :last]


# --- what kernels take inside: functions as in inside.py --------------------------------------------------------------

FP32 = 4


def inside_flash(gpu, q, k, v, dropout=0.0, *rest):
    """Return fp32 sums for each part of the keys, which are split among processors where rows are too few."""
    if dropout:
        return (16,)  # the generator's counters
    batch, heads, rows, size = q.shape
    keys = k.shape[2]
    if rows == 1 and heads > k.shape[1] and size % 8 == 0:  # heads of a group become rows
        rows, heads = heads // k.shape[1], k.shape[1]
    tile = 256 if size <= 64 else 128 if size <= 128 else 64
    splits = _splits(batch * heads * _tiles(rows, 64), 2 * gpu.processors, _tiles(keys, tile))
    sums = splits * batch * heads * rows * FP32
    return () if splits == 1 else (sums, sums * _up(size, 32))


def _splits(parts, processors, tiles):
    """Return the fewest splits that keep processors busy to 85 % of the best."""
    if parts >= 0.8 * processors:
        return 1
    def busy(splits):
        waves = parts * splits / processors
        return waves / math.ceil(waves)

    some = range(1, min(128, processors, tiles) + 1)
    eligible = [n for n in some if n == 1 or _tiles(tiles, n) != _tiles(tiles, n - 1)]
    best = max(map(busy, eligible))
    return next(n for n in eligible if busy(n) >= 0.85 * best)


def _in_rows(*tensors):
    """Return copies of the tensors that are not laid out as (B, T, H, D)."""
    return [x.nbytes for x in tensors if not x.transpose(1, 2).is_contiguous()]


def inside_flash_backward(gpu, d_out, q, k, v, out, *rest):
    """Return copies of dO and O, each row's sum of dO · O, dQ in fp32, and with shared keys dK and dV of each head."""
    batch, heads, rows, size = q.shape
    shared = [] if heads == k.shape[1] else [batch * k.shape[2] * heads * size * q.element_size()] * 2
    sums = batch * heads * _up(rows, 128) * FP32
    return *_in_rows(d_out, out), sums, sums * _up(size, 32), *shared


def inside_efficient(gpu, q, k, v, *rest):
    """Return the output in fp32, for 16-bit heads wider than 128."""
    batch, heads, rows, _ = q.shape
    wide = v.shape[-1]
    return (batch * heads * rows * wide * FP32,) if q.dtype is not torch.float32 and wide > 128 else ()


def inside_efficient_backward(gpu, d_out, q, k, v, *rest):
    """Return dQ in fp32 by tiles and each row's sum of dO · O; for wide 16-bit heads also dK and dV in fp32; with
    shared keys also repeated K and V, and dK and dV of each head."""
    batch, heads, rows, size = q.shape
    keys, wide = k.shape[2], v.shape[-1]
    tall, across = _tile(gpu.capability, q.dtype, max(size, wide))
    dq = _tiles(rows, tall) * _tiles(size, across) * (tall * across * FP32 + 16)
    dkv = 0
    if q.dtype is not torch.float32 and max(size, wide) > 128:
        splits = max(1, min(_tiles(keys, 64), 200 // (batch * heads)))
        dkv = splits * 64 * (_up(size, 128) + _up(wide, 128)) * FP32
    workspace, sums = batch * heads * (dq + dkv), batch * heads * rows * FP32
    shared = [] if heads == k.shape[1] else [batch * heads * keys * n * q.element_size() for n in (size, wide)]
    product = batch * heads * rows * wide * FP32  # of fp32 the sum is taken beforehand
    copied = _in_rows(d_out)
    if q.dtype is torch.float32 and product + sums > workspace:
        return *copied, *shared, sums, product, sums
    return *copied, *shared, sums, workspace


def _tile(capability, dtype, size):
    """Return (rows, columns) of dQ that a block of threads adds to."""
    if size <= 64 or (dtype is torch.float32 and capability < (8, 0)):
        return 64, 64
    little = capability < (8, 0) or (capability in ((8, 6), (8, 9)) and size <= 96)
    return 128, 64 if dtype is torch.float32 or size > 128 or little else 128


def _tiles(length, tile):
    return -(-length // tile)


def _up(length, tile):
    return _tiles(length, tile) * tile
