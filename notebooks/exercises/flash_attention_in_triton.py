"""Exercises of the page *FlashAttention in Triton*."""

import math
import os

import torch
import triton
import triton.language as tl

from refimpl import memory
from refimpl.attention import flash_attention
from refimpl.attention.kernel_traffic import counted

from . import close, drawn, exercise


@triton.jit
def smallest_kernel(q, k, v, out, T, c, D: tl.constexpr, BLOCK: tl.constexpr):
    """Compute attention of one tile of queries of one head, without a mask. Tensors are (heads, T, D),
    contiguous; T is a multiple of BLOCK; c = scale · log2 e."""
    tile = tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :]  # from a tile's first element
    head = tl.program_id(1) * T * D
    here = head + tl.program_id(0) * BLOCK * D
    q_MD = tl.load(q + here + tile)
    m_M, l_M = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    acc_MD = tl.zeros([BLOCK, D], tl.float32)
    for key in range(0, T, BLOCK):
        k_ND = tl.load(k + head + key * D + tile)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee") * c
        m_new_M = tl.maximum(m_M, tl.max(s_MN, 1))
        p_MN, shrink_M = tl.exp2(s_MN - m_new_M[:, None]), tl.exp2(m_M - m_new_M)
        l_M = l_M * shrink_M + tl.sum(p_MN, 1)
        v_ND = tl.load(v + head + key * D + tile)
        acc_MD = tl.dot(p_MN, v_ND, acc_MD * shrink_M[:, None], input_precision="ieee")
        m_M = m_new_M
    tl.store(out + here + tile, acc_MD / l_M[:, None])


def smallest_attention(q_BHTD, k_BHTD, v_BHTD, block=32):
    """Return softmax(q kᵀ / √D) v by `smallest_kernel`, for contiguous fp32 tensors (B, H, T, D)."""
    (B, H, T, D), out_BHTD = q_BHTD.shape, torch.empty_like(q_BHTD)
    smallest_kernel[T // block, B * H](q_BHTD, k_BHTD, v_BHTD, out_BHTD, T, D**-0.5 * math.log2(math.e), D, block)
    return out_BHTD


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _counts():
    """Tell whether a kernel's loads can be counted here: only Triton's interpreter does."""
    return DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def _run(answer, *tensors, names, arguments=()):
    """Return (what `answer` returned, its peak in bytes above its inputs, Counted or None)."""
    if not _counts():
        with memory.track(*tensors) as t:
            said = answer(*tensors, *arguments)
        return said, t.peak.total - t.start.total, None
    with counted(**dict(zip(names, tensors, strict=True))) as traffic, memory.track(*tensors) as t:
        said = answer(*tensors, *arguments)
    return said, t.peak.total - t.start.total, traffic


@exercise("parity and bytes", torch.Tensor)
def first(logsumexp):
    """Grade `logsumexp(x, tile)`, which returns ln Σ exp of each row of x (R, N), fp32, by a Triton kernel.

    The kernel loads `tile` elements at a time, each element once, and writes R numbers. Scores are large, and a row may
    begin with a whole tile of −∞.
    """
    for what, scale in (("a row of 1,000", 1), ("large scores", 100), ("a row that begins with −∞", 1)):
        (x,) = drawn((3, 1000), scale=scale, device=DEVICE)
        if "begins" in what:
            x[1, :200] = -math.inf
        said, took, traffic = _run(logsumexp, x, names=["x"], arguments=[128])
        if not close(said, x.logsumexp(dim=1)):
            return f"{what}: not its logsumexp" + " (NaN)" * bool(said.isnan().any())
    if took > 4 * len(x):
        return f"right, but it took {took:,} bytes: expected {4 * len(x)}, a number for each row"
    if traffic is None:
        return None
    if not traffic.loaded["x"]:
        return "right, but no Triton kernel read x"
    if traffic.loaded["x"] > x.nbytes:
        return f"right, but it reads x {traffic.loaded['x'] / x.nbytes:g} times: once is enough"
    if traffic.largest["x"] > 128:
        return f"right, but it holds {traffic.largest['x']:,} elements at a time: expected a tile of 128"
    return None


@exercise("parity and bytes", torch.Tensor)
def second(attend):
    """Grade `attend(q, k, v, cap)`, which returns attention with scores cap · tanh(s / cap) in place of s.

    One Triton kernel computes it and writes only the output. Tensors are contiguous fp32 (B, H, T, D), with T and D
    multiples of 16. There is no mask.
    """
    for B, H, T, D, cap, scale in ((1, 2, 64, 16, 5.0, 3), (2, 1, 96, 32, 1.0, 20)):
        q, k, v = drawn(*[(B, H, T, D)] * 3, scale=scale, device=DEVICE)
        capped = cap * torch.tanh(q @ k.mT * D**-0.5 / cap)
        said, took, traffic = _run(attend, q, k, v, names="qkv", arguments=[cap])
        if not close(said, capped.softmax(dim=-1) @ v):
            plain = " (it is plain attention)" * close(said, flash_attention(q, k, v))
            return f"scores up to {scale * 5}, cap {cap:g}: not softmax(cap · tanh(s / cap)) v{plain}" + (
                " (NaN)" * bool(said.isnan().any()))
    if took > q.nbytes:
        return f"right, but it took {took:,} bytes: expected {q.nbytes:,}, the output"
    if traffic is not None and not traffic.loaded["k"]:
        return "right, but no Triton kernel read k"
    return None
