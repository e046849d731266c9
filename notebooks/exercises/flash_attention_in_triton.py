"""Exercises of the page *FlashAttention in Triton*."""

import contextlib
import math
import os

import torch
import triton
import triton.language as tl

from refimpl import memory
from refimpl.attention import flash_attention
from refimpl.attention.kernel_traffic import counted

from . import Complaint, close, drawn, exercise, readable

HINTS = {
    "first": [
        "One program has one row. Start with `m = -float(\"inf\")` and `total = 0.0`, and loop over "
        "`range(0, N, TILE)`. Load with `mask=first + columns < N, other=-float(\"inf\")`.",
        "The new maximum is `tl.maximum(m, tl.max(scores, 0))`. `total` is times `tl.exp(m - new)`, plus "
        "`tl.sum(tl.exp(scores - new), 0)`. In the end store `m + tl.log(total)`.",
        "As long as all scores are −∞, the new maximum is −∞, and −∞ − (−∞) is NaN. Subtract "
        "`tl.where(new == -float(\"inf\"), 0.0, new)` instead."],
    "second": [
        "Copy `exercise.smallest_kernel`. Only the line of `s_MN` changes: scale, then bound, then the factor log₂ e "
        "for `tl.exp2`. Give the kernel 1/√D and the cap apart.",
        "tanh x is 2σ(2x) − 1, and `tl.sigmoid` bears large scores. (e^2x − 1)/(e^2x + 1) overflows.",
        "`s_MN = cap * (2 * tl.sigmoid(2 * scale * tl.dot(q_MD, k_ND.T, input_precision=\"ieee\") / cap) - 1)`, then "
        "times log₂ e. T is a multiple of 16, so take tiles of 16."]}


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


def counts():
    """Tell whether a kernel's loads can be counted here: only Triton's interpreter does."""
    return DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def ran(answer, given, *arguments):
    """Return (what `answer` returned, its peak in bytes above its inputs, Counted or None). `given`: {name: tensor}."""
    before = [x.clone() for x in given.values()]
    with counted(**given) if counts() else contextlib.nullcontext() as traffic, memory.track(*given.values()) as t:
        said = answer(*given.values(), *arguments)
    for (name, x), old in zip(given.items(), before, strict=True):
        if not torch.equal(x, old):
            raise Complaint(f"your function changes {name}")
    return said, t.peak.total - t.start.total, traffic


def differs(said, expected):
    """Return a sentence if a tensor is not what was expected, else None."""
    if said.shape != expected.shape or said.dtype != expected.dtype:
        return (f"it is {tuple(said.shape)} in {said.dtype}, expected {tuple(expected.shape)} in {expected.dtype}")
    if not readable(said):
        return "its storage was freed"
    if close(said, expected):
        return None
    if said.isnan().any():
        return "it has NaN: an exp that overflows, or −∞ − (−∞)"
    at = (said - expected).abs().argmax()
    return f"a number is {said.flatten()[at]:.8g}, expected {expected.flatten()[at]:.8g}"


@exercise("parity and bytes", torch.Tensor)
def first(logsumexp):
    """Grade `logsumexp(x, tile)`, which returns ln Σ exp of each row of x (R, N), fp32, by a Triton kernel.

    The kernel loads at most `tile` elements at a time, each element once, and writes R numbers. Scores are large, and a
    row may begin with a whole tile of −∞.
    """
    wasted = None
    for what, shape, tile, scale, shift in (("rows of 1,000", (3, 1000), 128, 1, 0), ("large scores", (2, 130), 64, 100,
                                            0), ("scores about -200", (4, 70), 32, 1, -200),
                                            ("a row that begins with −∞", (3, 300), 64, 1, 0)):
        x = drawn(shape, scale=scale, device=DEVICE)[0] + shift
        if "begins" in what:
            x[1, :200] = -math.inf
        said, took, traffic = ran(logsumexp, {"x": x}, tile)
        if wrong := differs(said, x.logsumexp(dim=1)):
            return f"{what}, tiles of {tile}: not its logsumexp: {wrong}"
        wasted = wasted or _wasted(x, tile, took, traffic)
    return wasted


def _wasted(x, tile, took, traffic):
    """Return a sentence about bytes that the logsumexp of rows does not need, else None."""
    if took > 4 * len(x):
        return f"right, but it took {took:,} bytes: expected {4 * len(x)}, a number for each row"
    if traffic is None:
        return None
    if not traffic.loaded["x"]:
        return "right, but no Triton kernel read x"
    if traffic.loaded["x"] > x.nbytes:
        return f"right, but it reads x {traffic.loaded['x'] / x.nbytes:.3g} times: once is enough"
    if traffic.largest["x"] > tile:
        return f"right, but it holds {traffic.largest['x']:,} elements at a time: expected a tile of {tile}"
    return None


@exercise("parity and bytes", torch.Tensor)
def second(attend):
    """Grade `attend(q, k, v, cap)`, which returns attention with scores cap · tanh(s / cap) in place of s.

    A Triton kernel computes it and writes only the output. Tensors are contiguous fp32 (B, H, T, D), with T and D
    multiples of 16. There is no mask.
    """
    wasted = None
    for B, H, T, D, cap, scale in ((1, 2, 80, 16, 5.0, 3), (2, 1, 48, 32, 1.0, 40), (1, 2, 32, 16, 120.0, 60)):
        q, k, v = drawn(*[(B, H, T, D)] * 3, scale=scale, device=DEVICE)
        s = q @ k.mT * D**-0.5
        said, took, traffic = ran(attend, {"q": q, "k": k, "v": v}, cap)
        if wrong := differs(said, (cap * torch.tanh(s / cap)).softmax(dim=-1) @ v):
            plain = "it is plain attention" if differs(said, flash_attention(q, k, v)) is None else wrong
            return (f"{T} tokens of {D}, scores up to {s.abs().max().item():.0f}, cap {cap:g}: not "
                    f"softmax(cap · tanh(s / cap)) v: {plain}")
        if wasted is None and took > q.nbytes:
            wasted = f"right, but it took {took:,} bytes: expected {q.nbytes:,}, the output"
        if wasted is None and traffic is not None and not all(traffic.loaded[name] for name in "qkv"):
            wasted = "right, but no Triton kernel read q, k and v"
    return wasted
