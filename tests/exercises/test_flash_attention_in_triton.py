"""Right answers pass, wrong and unanswered ones do not."""

import functools
import math
import os

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
def lse_kernel(x, out, N, BLOCK: tl.constexpr, SAFE: tl.constexpr, RESCALED: tl.constexpr, OTHER: tl.constexpr):
    row, columns = tl.program_id(0) * N, tl.arange(0, BLOCK)
    m, total = -float("inf"), 0.0
    for first in range(0, N, BLOCK):
        tile = tl.load(x + row + first + columns, mask=first + columns < N, other=OTHER)
        m_new = tl.maximum(m, tl.max(tile, 0))
        base = tl.where(m_new == -INF, 0.0, m_new) if SAFE else m_new
        total = (total * tl.exp(m - base) if RESCALED else total) + tl.sum(tl.exp(tile - base), 0)
        m = m_new
    tl.store(out + tl.program_id(0), m + tl.log(total))


def logsumexp(x, tile, safe=True, rescaled=True, other=-math.inf, block=None):
    out = x.new_empty(len(x))
    lse_kernel[(len(x),)](x, out, x.shape[1], block or tile, safe, rescaled, other)
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


# --- 2: capped scores ------------------------------------------------------------------------------------------------


@triton.jit
def capped_kernel(q, k, v, out, T, scale, cap, D: tl.constexpr, BLOCK: tl.constexpr, BEFORE: tl.constexpr):
    tile = tl.arange(0, BLOCK)[:, None] * D + tl.arange(0, D)[None, :]
    head = tl.program_id(1) * T * D
    here = head + tl.program_id(0) * BLOCK * D
    q_MD = tl.load(q + here + tile)
    m_M, l_M = tl.full([BLOCK], -INF, tl.float32), tl.zeros([BLOCK], tl.float32)
    acc_MD = tl.zeros([BLOCK, D], tl.float32)
    for key in range(0, T, BLOCK):
        s_MN = tl.dot(q_MD, tl.load(k + head + key * D + tile).T, input_precision="ieee") * scale
        if BEFORE:
            s_MN = cap * (2 * tl.sigmoid(2 * s_MN / cap) - 1)
        m_new_M = tl.maximum(m_M, tl.max(s_MN, 1))
        p_MN, shrink_M = tl.exp(s_MN - m_new_M[:, None]), tl.exp(m_M - m_new_M)
        l_M = l_M * shrink_M + tl.sum(p_MN, 1)
        acc_MD = tl.dot(p_MN, tl.load(v + head + key * D + tile), acc_MD * shrink_M[:, None], input_precision="ieee")
        m_M = m_new_M
    tl.store(out + here + tile, acc_MD / l_M[:, None])


def attend(q, k, v, cap, scale=None, before=True):
    (B, H, T, D), out = q.shape, torch.empty_like(q)
    capped_kernel[T // 16, B * H](q, k, v, out, T, scale or D**-0.5, cap, D, 16, before)
    return out


def dense(q, k, v, cap):
    return (cap * torch.tanh(q @ k.mT * q.shape[-1] ** -0.5 / cap)).softmax(dim=-1) @ v


@torch.library.custom_op("refimpl_tests::dense_inside", mutates_args=())
def dense_inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cap: float) -> torch.Tensor:
    return dense(q, k, v, cap)


# --- verdicts --------------------------------------------------------------------------------------------------------


ANSWERS = {
    page.first: Answers(
        right=[logsumexp],
        wrong=[
            (functools.partial(logsumexp, other=0.0), "a row of 1,000: not its logsumexp"),
            (functools.partial(logsumexp, rescaled=False), "a row of 1,000: not its logsumexp"),
            (functools.partial(logsumexp, safe=False), "a row that begins with −∞: not its logsumexp (NaN)"),
            (lambda x, tile: x.exp().sum(dim=1).log(), "large scores: not its logsumexp"),
            (lambda x, tile: x.logsumexp(dim=1), "right, but no Triton kernel read x"),
            (two_passes, "right, but it reads x 2 times"),
            (functools.partial(logsumexp, block=1024), "right, but it holds 1,000 elements at a time"),
            (lambda x, tile: logsumexp(x.clone(), tile), "right, but it took")],
    ),
    page.second: Answers(
        right=[attend],
        wrong=[
            (functools.partial(attend, before=False), "plain attention"),
            (functools.partial(attend, scale=1.0), "not softmax(cap · tanh(s / cap)) v"),
            (dense, "right, but it took"),
            (dense_inside, "right, but no Triton kernel read k")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


# --- what the page shows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("D", "block"), [(16, 32), (64, 16)])
def test_the_smallest_kernel_is_attention(D, block):
    q, k, v = torch.randn(3, 2, 3, 96, D)
    torch.testing.assert_close(page.smallest_attention(q, k, v, block), reference_attention(q, k, v))
