"""Right answers pass, wrong and unanswered ones do not."""

import math
import os
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from exercises_kit import Answers, graded

from exercises import flash_attention_in_triton as page
from refimpl.attention import reference_attention

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # −∞ − (−∞) in an answer that is to be found wrong
]
INF = tl.constexpr(float("inf"))


# --- 1: the logsumexp of rows ----------------------------------------------------------------------------------------


@triton.jit
def lse_kernel(x, out, N, TILE: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, TILE)
    m, total = -float("inf"), 0.0
    for first in range(0, N, TILE):
        scores = tl.load(x + row * N + first + columns, mask=first + columns < N, other=-float("inf"))
        new = tl.maximum(m, tl.max(scores, 0))
        base = tl.where(new == -float("inf"), 0.0, new)  # −∞ − (−∞) is NaN
        total = total * tl.exp(m - base) + tl.sum(tl.exp(scores - base), 0)
        m = new
    tl.store(out + row, m + tl.log(total))


def logsumexp(x, tile):
    out = x.new_empty(len(x))
    lse_kernel[(len(x),)](x, out, x.shape[1], tile)
    return out


@triton.jit
def merging_kernel(x, out, N, TILE: tl.constexpr):
    """Merge the logsumexps of tiles, in base 2."""
    columns, found = tl.arange(0, TILE), -float("inf")
    for first in range(0, N, TILE):
        at = x + tl.program_id(0) * N + first + columns
        scores = 1.4426950408889634 * tl.load(at, mask=first + columns < N, other=-float("inf"))
        m = tl.maximum(tl.max(scores, 0), -1e30)
        new = m + tl.log2(tl.sum(tl.exp2(scores - m), 0))
        high, low = tl.maximum(found, new), tl.minimum(found, new)
        found = tl.where(low == -float("inf"), high, high + tl.log2(1 + tl.exp2(low - high)))
    tl.store(out + tl.program_id(0), found * 0.6931471805599453)


def merged_tiles(x, tile):
    out = torch.empty(x.shape[0], device=x.device)
    merging_kernel[(x.shape[0],)](x, out, x.shape[1], TILE=tile)
    return out


@triton.jit
def lanes_kernel(x, out, N, TILE: tl.constexpr):
    """Each lane has a maximum and a sum of its own; they are merged at the end."""
    columns = tl.arange(0, TILE)
    m, total = tl.full([TILE], -1e30, tl.float32), tl.zeros([TILE], tl.float32)
    for first in range(0, N, TILE):
        scores = tl.load(x + tl.program_id(0) * N + first + columns, mask=first + columns < N, other=-1e30)
        new = tl.maximum(m, scores)
        total = total * tl.exp(m - new) + tl.where(scores > -1e30, tl.exp(scores - new), 0.0)
        m = new
    most = tl.max(m, 0)
    tl.store(out + tl.program_id(0), most + tl.log(tl.sum(total * tl.exp(m - most), 0)))


def in_lanes(x, tile):
    out = x.new_empty(x.shape[:1])
    lanes_kernel[len(x),](x, out, x.shape[1], tile)
    return out


@triton.jit
def faulty_lse_kernel(x, out, N, end, BLOCK: tl.constexpr, SAFE: tl.constexpr, RESCALED: tl.constexpr,
                      OTHER: tl.constexpr, START: tl.constexpr, LOG: tl.constexpr, CHANGES: tl.constexpr):
    row, columns = tl.program_id(0) * N, tl.arange(0, BLOCK)
    m, total = START, 0.0
    for first in range(0, end, BLOCK):
        tile = tl.load(x + row + first + columns, mask=first + columns < N, other=OTHER)
        m_new = tl.maximum(m, tl.max(tile, 0))
        base = tl.where(m_new == -INF, 0.0, m_new) if SAFE else m_new
        total = (total * tl.exp(m - base) if RESCALED else total) + tl.sum(tl.exp(tile - base), 0)
        m = m_new
        if CHANGES:
            tl.store(x + row + first + columns, tile - base, mask=first + columns < N)
    tl.store(out + tl.program_id(0), m + tl.log(total) if LOG else total)


def with_fault(x, tile, *, safe=True, rescaled=True, other=-math.inf, block=None, end=None, start=-math.inf, log=True,
               changes=False):
    out = x.new_empty(len(x))
    N = x.shape[1]
    faulty_lse_kernel[(len(x),)](x, out, N, end(N, tile) if end else N, block or tile, safe, rescaled, other, start,
                                 log, changes)
    return out


@triton.jit
def two_pass_kernel(x, out, N, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0) * N, tl.arange(0, BLOCK)
    m, total = -float("inf"), 0.0
    for first in range(0, N, BLOCK):
        m = tl.maximum(m, tl.max(tl.load(x + row + first + columns, mask=first + columns < N, other=-INF), 0))
    for first in range(0, N, BLOCK):
        total += tl.sum(tl.exp(tl.load(x + row + first + columns, mask=first + columns < N, other=-INF) - m), 0)
    tl.store(out + tl.program_id(0), m + tl.log(total))


def two_passes(x, tile):
    out = x.new_empty(len(x))
    two_pass_kernel[(len(x),)](x, out, x.shape[1], tile)
    return out


def freed(x, tile):
    out = logsumexp(x, tile)
    out.untyped_storage().resize_(0)
    return out


# --- 2: capped scores ------------------------------------------------------------------------------------------------


@triton.jit
def capped_kernel(q, k, v, out, T, scale, cap, D: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :]
    head = tl.program_id(1) * T * D
    here = head + tl.program_id(0) * BLOCK * D
    q_MD = tl.load(q + here + tile)
    m_M, l_M = tl.full([BLOCK], -float("inf"), tl.float32), tl.zeros([BLOCK], tl.float32)
    acc_MD = tl.zeros([BLOCK, D], tl.float32)
    for key in range(0, T, BLOCK):
        k_ND, v_ND = tl.load(k + head + key * D + tile), tl.load(v + head + key * D + tile)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee") * scale
        s_MN = cap * (2 * tl.sigmoid(2 * s_MN / cap) - 1.0)  # cap · tanh(s / cap)
        new_M = tl.maximum(m_M, tl.max(s_MN, 1))
        p_MN, shrink_M = tl.exp(s_MN - new_M[:, None]), tl.exp(m_M - new_M)
        l_M = l_M * shrink_M + tl.sum(p_MN, 1)
        acc_MD = tl.dot(p_MN, v_ND, acc_MD * shrink_M[:, None], input_precision="ieee")
        m_M = new_M
    tl.store(out + here + tile, acc_MD / l_M[:, None])


def attend(q, k, v, cap):
    (B, H, T, D), out = q.shape, torch.empty_like(q)
    capped_kernel[(T // 16, B * H)](q, k, v, out, T, D**-0.5, cap, D, 16)
    return out


@triton.jit
def whole_rows_kernel(q, k, v, out, D: tl.constexpr, cap, c, T: tl.constexpr, PADDED: tl.constexpr):
    """One program holds 16 queries and all their scores; the maximum is known, it is the cap."""
    rows, keys, columns = tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, PADDED), tl.arange(0, D)
    head, here = tl.program_id(1) * T * D, keys < T
    q_MD = tl.load(q + head + rows[:, None] * D + columns[None, :])
    k_ND = tl.load(k + head + keys[:, None] * D + columns[None, :], mask=here[:, None], other=0.0)
    x_MN = tl.exp(-2 * tl.abs(s_MN := tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * c))
    tanh_MN = tl.where(s_MN < 0, -1.0, 1.0) * (1 - x_MN) / (1 + x_MN)
    p_MN = tl.where(here[None, :], tl.exp(cap * tanh_MN - cap), 0.0)
    v_ND = tl.load(v + head + keys[:, None] * D + columns[None, :], mask=here[:, None], other=0.0)
    o_MD = tl.dot(p_MN, v_ND, input_precision="ieee") / tl.sum(p_MN, 1)[:, None]
    tl.store(out + head + rows[:, None] * D + columns[None, :], o_MD)


def with_whole_rows(q, k, v, cap):
    (B, H, T, D), out = q.shape, torch.empty(q.shape, device=q.device)
    whole_rows_kernel[T // 16, B * H](q, k, v, out, D, cap, D**-0.5 / cap, T, triton.next_power_of_2(T))
    return out


@triton.jit
def online_kernel(q, k, v, out, T, c, cap, D: tl.constexpr, N: tl.constexpr, WHAT: tl.constexpr):
    """The page's kernel in base 2, bounded. WHAT names a fault; "" is none."""
    tile = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    head = 0 if WHAT == "first head" else tl.program_id(1) * T * D
    here = head + tl.program_id(0) * N * D
    q_MD, o_MD = tl.load(q + here + tile), tl.zeros([N, D], tl.float32)
    m_M, l_M = tl.full([N], 0.0 if WHAT == "no maximum" else -INF, tl.float32), tl.zeros([N], tl.float32)
    for at in range(0, T * D, N * D):
        k_ND, v_ND = tl.load(k + head + at + tile), tl.load(v + head + at + tile)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
        if WHAT != "scale after":
            s_MN = s_MN * c
        if WHAT == "exp":
            e_MN = tl.exp(2 * s_MN / cap)
            s_MN = cap * (e_MN - 1) / (e_MN + 1)
        elif WHAT == "one sigma":
            s_MN = cap * tl.sigmoid(s_MN / cap)
        elif WHAT == "no factor":
            s_MN = 2 * tl.sigmoid(2 * s_MN / cap) - 1
        elif WHAT == "clamp":
            s_MN = tl.minimum(tl.maximum(s_MN, -cap), cap)
        elif WHAT != "plain":
            s_MN = cap * (2 * tl.sigmoid(2 * s_MN / cap) - 1)
        if WHAT == "scale after":
            s_MN = s_MN * c
        if WHAT != "base 2":
            s_MN = s_MN * 1.4426950408889634
        if WHAT == "causal":
            rows = tl.program_id(0) * N * D + tl.arange(0, N)[:, None] * D
            s_MN = tl.where(rows >= at + tl.arange(0, N)[None, :] * D, s_MN, -INF)
        new_M = m_M if WHAT == "no maximum" else tl.maximum(m_M, tl.max(s_MN, 1))
        p_MN, shrink_M = tl.exp2(s_MN - new_M[:, None]), tl.exp2(m_M - new_M)
        if WHAT == "not shrunk":
            shrink_M = tl.full([N], 1.0, tl.float32)
        l_M = l_M * shrink_M + tl.sum(p_MN, 1)
        o_MD = tl.dot(p_MN, v_ND, o_MD * shrink_M[:, None], input_precision="ieee")
        m_M = new_M
    tl.store(out + here + tile, o_MD if WHAT == "no division" else o_MD / l_M[:, None])


def online(q, k, v, cap, what="", scale=None, programs=16):
    (B, H, T, D), out = q.shape, torch.empty_like(q)
    online_kernel[T // programs, B * H](q, k, v, out, T, scale or D**-0.5, cap, D, 16, what)
    return out


def dense(q, k, v, cap):
    """Right, with the matrix."""
    return (cap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / cap)).softmax(dim=-1) @ v


@torch.library.custom_op("refimpl_tests::dense_inside", mutates_args=())
def dense_inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float) -> torch.Tensor:
    return dense(q, k, v, cap)


# --- verdicts --------------------------------------------------------------------------------------------------------


ANSWERS = {
    page.first: Answers(
        right=[logsumexp, merged_tiles, in_lanes],
        wrong=[
            (partial(with_fault, other=0.0), "rows of 1,000, tiles of 128: not its logsumexp: a number is"),
            (partial(with_fault, rescaled=False), "rows of 1,000, tiles of 128: not its logsumexp: a number is"),
            (partial(with_fault, end=lambda N, tile: N // tile * tile), "rows of 1,000, tiles of 128: not its"),
            (partial(with_fault, end=lambda N, tile: tile), "rows of 1,000, tiles of 128: not its logsumexp"),
            (partial(with_fault, log=False), "rows of 1,000, tiles of 128: not its logsumexp"),
            (partial(with_fault, start=0.0), "scores about -200, tiles of 32: not its logsumexp: a number is -inf"),
            (partial(with_fault, safe=False), "a row that begins with −∞, tiles of 64: not its logsumexp: it has NaN"),
            (lambda x, tile: x.exp().sum(dim=1).log(), "large scores, tiles of 64: not its logsumexp: a number is inf"),
            (lambda x, tile: logsumexp(x, tile)[:, None], "it is (3, 1) in torch.float32, expected (3,) in"),
            (lambda x, tile: logsumexp(x, tile) / math.log(2), "rows of 1,000, tiles of 128: not its logsumexp"),
            (lambda x, tile: logsumexp(x[:1], tile).expand(len(x)), "rows of 1,000, tiles of 128: not its logsumexp"),
            (partial(with_fault, changes=True), "your function changes x"),
            (freed, "its storage was freed"),
            (lambda x, tile: x.logsumexp(dim=1), "right, but no Triton kernel read x"),
            (two_passes, "right, but it reads x 2 times"),
            (partial(with_fault, block=1024), "right, but it holds 1,000 elements at a time: expected a tile of 128"),
            (partial(with_fault, block=128), "right, but it holds 128 elements at a time: expected a tile of 64")],
        saves_nothing=(lambda x, tile: logsumexp(x.clone(), tile), "right, but it took 12,012 bytes: expected 12"),
        same=("m, tl.max(scores, 0) → tl.max(scores, 0), m",),
    ),
    page.second: Answers(
        right=[attend, with_whole_rows, online],
        wrong=[
            (partial(online, what="plain"), "80 tokens of 16, scores up to 13, cap 5: not softmax(cap · tanh(s / cap)) "
                                            "v: it is plain attention"),
            (partial(online, scale=1.0), "cap 5: not softmax(cap · tanh(s / cap)) v: a number is"),
            (partial(online, scale=0.25), "48 tokens of 32"),
            (lambda q, k, v, cap: attend(q, k, v, 5.0), "48 tokens of 32"),
            (partial(online, what="scale after"), "not softmax(cap · tanh(s / cap)) v: a number is"),
            (partial(online, what="exp"), "cap 1: not softmax(cap · tanh(s / cap)) v: it has NaN: an exp that"),
            (partial(online, what="one sigma"), "not softmax(cap · tanh(s / cap)) v: a number is"),
            (partial(online, what="no factor"), "not softmax(cap · tanh(s / cap)) v: a number is"),
            (partial(online, what="clamp"), "not softmax(cap · tanh(s / cap)) v: a number is"),
            (partial(online, what="base 2"), "not softmax(cap · tanh(s / cap)) v: a number is"),
            (partial(online, what="causal"), "not softmax(cap · tanh(s / cap)) v: a number is"),
            (partial(online, what="no maximum"), "cap 120: not softmax(cap · tanh(s / cap)) v: it has NaN"),
            (partial(online, what="not shrunk"), "not softmax(cap · tanh(s / cap)) v: a number is"),
            (partial(online, what="no division"), "not softmax(cap · tanh(s / cap)) v: a number is"),
            (partial(online, what="first head"), "not softmax(cap · tanh(s / cap)) v"),
            (partial(online, programs=32), "not softmax(cap · tanh(s / cap)) v"),
            (lambda q, k, v, cap: attend(q, v, k, cap), "not softmax(cap · tanh(s / cap)) v: a number is"),
            (lambda q, k, v, cap: attend(q, k, v, cap).transpose(1, 2), "it is (1, 80, 2, 16) in torch.float32, "
                                                                        "expected (1, 2, 80, 16)"),
            (lambda q, k, v, cap: attend(q.mul_(1), k, v.mul_(-1), cap).neg_(), "your function changes v"),
            (lambda q, k, v, cap: attend(q * 1.0, k, v, cap), "right, but it took 20,480 bytes: expected 10,240"),
            (dense_inside, "right, but no Triton kernel read q, k and v")],
        saves_nothing=(dense, "right, but it took"),
        same=("- → +",  # of tanh: a constant more in all scores; the other differences are tested above
              "m_M, tl.max(s_MN, 1) → tl.max(s_MN, 1), m_M"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


# --- what the page shows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("D", "block"), [(16, 32), (64, 16)])
def test_the_smallest_kernel_is_attention(D, block):
    q, k, v = torch.randn(3, 2, 3, 96, D)
    torch.testing.assert_close(page.smallest_attention(q, k, v, block), reference_attention(q, k, v))
