"""The codec as two Triton kernels, each of which reads its input once and writes its output once.

    quantize      program (i, r): T numbers of row r, a few whole blocks       reads e·n, writes n·bits/8 + 4n/b bytes
    dequantize    program (i, g): T numbers of row g, from all R payloads       reads R·(n·bits/8 + 4n/b), writes e·n

with e bytes of a number. Plain torch makes some eight passes over fp32 copies in place of one. The mean of R payloads
is a sum in registers: R decoded copies never exist. A row begins at a multiple of 16 bytes. With 4 bits a byte has
an even and an odd number of a row.

Rounding is to nearest, ties to even, as torch.round does it: adding 1.5 · 2²³ to a number leaves no bits for fractions.
"""

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl

TILE = 2048  # numbers of a program, or one block if that is larger
WARPS = 4


class Launch(NamedTuple):
    """A kernel with everything that it is launched with, or compiled with for a GPU that is not there."""

    kernel: object
    grid: tuple
    arguments: dict
    num_warps: int = WARPS
    num_stages: int = 1

    @property
    def config(self):
        """Return itself: it has `num_warps` and `num_stages`."""
        return self

    def run(self, device):
        """Launch on `device`: Triton itself launches on the current one."""
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


@triton.jit
def largest(x_BK, bad_BK):
    """Return the largest |x| of each block, NaN where one of them is not finite: `tl.max` may drop a NaN."""
    top_B = tl.max(tl.where(bad_BK, 0.0, tl.abs(x_BK)), 1)
    return tl.where(tl.max(bad_BK.to(tl.int32), 1) > 0, float("nan"), top_B)


@triton.jit
def codes_of(x_BK, s_B, bad_BK, LIMIT: tl.constexpr):
    """Return round(x / s) in int32; 0 where there is no number or no scale."""
    usable_B = s_B > 0  # not 0, nor NaN
    # div_rn: the plain division of a GPU rounds otherwise than torch's
    y_BK = tl.div_rn(tl.where(bad_BK, 0.0, x_BK), tl.where(usable_B, s_B, 1.0)[:, None])
    y_BK = tl.minimum(tl.maximum(tl.where(usable_B[:, None], y_BK, 0.0), -1.0 * LIMIT), 1.0 * LIMIT)
    return ((y_BK + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def quantize_kernel(x_ptr, scales_ptr, codes_ptr, n, x_stride, scales_stride, codes_stride, SMALLEST: tl.constexpr,
                    LIMIT: tl.constexpr, B: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr):
    """Encode B blocks of K numbers of a row; PACKED: two codes in a byte."""
    row = tl.program_id(1).to(tl.int64)  # offsets of large buckets exceed int32
    x_ptr += row * x_stride
    codes_ptr += row * codes_stride
    blocks = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    at_BK = blocks[:, None] * K + tl.arange(0, K)[None, :]
    x_BK = tl.load(x_ptr + at_BK, at_BK < n, 0.0).to(tl.float32)
    bad_BK = (x_BK != x_BK) | (tl.abs(x_BK) == float("inf"))
    s_B = largest(x_BK, bad_BK)
    s_B = tl.div_rn(s_B, tl.full([B], LIMIT, tl.float32))
    s_B = tl.where(s_B < SMALLEST, 0.0, s_B).to(scales_ptr.dtype.element_ty)
    tl.store(scales_ptr + row * scales_stride + blocks, s_B, blocks * K < n)
    s_B = s_B.to(tl.float32)
    q_BK = codes_of(x_BK, s_B, bad_BK, LIMIT)
    if PACKED:
        low_BP, high_BP = tl.split(tl.reshape(q_BK, [B, K // 2, 2]))
        pairs_BP = blocks[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :]
        tl.store(codes_ptr + pairs_BP, ((low_BP & 15) | ((high_BP & 15) << 4)).to(tl.uint8), 2 * pairs_BP < n)
    else:
        tl.store(codes_ptr + at_BK, (q_BK & 255).to(tl.uint8), at_BK < n)


@triton.jit
def dequantize_kernel(scales_ptr, codes_ptr, out_ptr, n, R, scales_group, scales_stride, codes_group, codes_stride,
                      out_stride, LIMIT: tl.constexpr, B: tl.constexpr, K: tl.constexpr, PACKED: tl.constexpr):
    """Write the mean of R payloads to B blocks of K numbers of a row."""
    group = tl.program_id(1).to(tl.int64)
    scales_ptr += group * scales_group
    codes_ptr += group * codes_group
    blocks = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    at_BK = blocks[:, None] * K + tl.arange(0, K)[None, :]
    total_BK = tl.zeros([B, K], tl.float32)
    for _ in range(R):
        s_B = tl.load(scales_ptr + blocks, blocks * K < n, 0.0).to(tl.float32)
        if PACKED:
            pairs_BP = blocks[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :]
            both_BP = tl.load(codes_ptr + pairs_BP, 2 * pairs_BP < n, 0).to(tl.int32)
            q_BK = tl.reshape(tl.join(both_BP & 15, both_BP >> 4), [B, K])
        else:
            q_BK = tl.load(codes_ptr + at_BK, at_BK < n, 0).to(tl.int32)
        q_BK = tl.where(q_BK > LIMIT, q_BK - 2 * (LIMIT + 1), q_BK)
        total_BK += q_BK.to(tl.float32) * s_B[:, None]
        scales_ptr += scales_stride
        codes_ptr += codes_stride
    mean_BK = tl.div_rn(total_BK, tl.full([B, K], R, tl.float32))
    tl.store(out_ptr + group * out_stride + at_BK, mean_BK.to(out_ptr.dtype.element_ty), at_BK < n)


def quantize_launch(x, scales, codes, bits, block):
    """Return the Launch that encodes x (R, n)."""
    R, n = x.shape
    return Launch(quantize_kernel, _grid(n, R, block), {
        "x_ptr": x, "scales_ptr": scales, "codes_ptr": codes, "n": n, "x_stride": x.stride(0),
        "scales_stride": scales.stride(0), "codes_stride": codes.stride(0),
        "SMALLEST": torch.finfo(torch.float32).tiny, **_constants(bits, block)})


def dequantize_launch(scales, codes, out, bits, block):
    """Return the Launch that decodes to out (G, n)."""
    G, n = out.shape
    return Launch(dequantize_kernel, _grid(n, G, block), {
        "scales_ptr": scales, "codes_ptr": codes, "out_ptr": out, "n": n, "R": scales.shape[1],
        "scales_group": scales.stride(0), "scales_stride": scales.stride(1), "codes_group": codes.stride(0),
        "codes_stride": codes.stride(1), "out_stride": out.stride(0), **_constants(bits, block)})


def _constants(bits, block):
    return {"LIMIT": 2 ** (bits - 1) - 1, "B": max(1, TILE // block), "K": block, "PACKED": bits == 4}


def _grid(n, rows, block):
    return triton.cdiv(n, max(TILE, block)), rows
