"""Right answers pass, wrong and unanswered ones do not."""

import functools
import math
import os

import pytest
import torch
import triton
import triton.language as tl
from exercises_kit import Answers, graded

from exercises import backward_in_triton as page
from refimpl import memory
from refimpl.attention import reference_attention

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")


# --- 1: the gradient of q --------------------------------------------------------------------------------------------


@triton.jit
def dq_kernel(q, k, v, d_out, lse, delta, dq, T, scale, D: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr,
              DELTA: tl.constexpr):
    tile, rows = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :], tl.program_id(0) * N + tl.arange(0, N)
    head = tl.program_id(1) * T
    here = head * D + tl.program_id(0) * N * D + tile
    q_MD, d_o_MD = tl.load(q + here), tl.load(d_out + here)
    lse_M, delta_M = tl.load(lse + head + rows), tl.load(delta + head + rows)
    dq_MD = tl.zeros([N, D], tl.float32)
    for key in range(0, T, N):
        if ALL:
            q_MD = tl.load(q + here)
        k_ND, v_ND = tl.load(k + (head + key) * D + tile), tl.load(v + (head + key) * D + tile)
        p_MN = tl.exp(tl.dot(q_MD, k_ND.T, input_precision="ieee") * scale - lse_M[:, None])
        dp_MN = tl.dot(d_o_MD, v_ND.T, input_precision="ieee")
        ds_MN = p_MN * (dp_MN - delta_M[:, None]) if DELTA else p_MN * dp_MN
        dq_MD = tl.dot(ds_MN, k_ND, dq_MD, input_precision="ieee")
    tl.store(dq + here, dq_MD * scale)


def dq(q, k, v, d_out, lse, delta, *, again=False, with_delta=True, scale=None):
    (B, H, T, D), found = q.shape, torch.empty_like(q)
    dq_kernel[T // 32, B * H](q, k, v, d_out, lse, delta, found, T, scale or D**-0.5, D, 32, again, with_delta)
    return found


def dq_in_torch(q, k, v, d_out, lse, delta):
    """Right, with the matrix."""
    p = (q @ k.mT * q.shape[-1] ** -0.5 - lse[..., None]).exp()
    return p * (d_out @ v.mT - delta[..., None]) @ k * q.shape[-1] ** -0.5


@torch.library.custom_op("refimpl_tests::dq_inside", mutates_args=())
def dq_inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor,
              delta: torch.Tensor) -> torch.Tensor:
    return dq_in_torch(q, k, v, d_out, lse, delta)


# --- 2: attention received -------------------------------------------------------------------------------------------


def received(q, k, lse, tile=64, causal=True, scaled=True):
    T, out = q.shape[2], k.new_empty(k.shape[:3])
    for first in range(0, T, tile):
        rows = slice(first if causal else 0, T)
        p = ((q.shape[-1] ** -0.5 if scaled else 1) * q[:, :, rows] @ k[:, :, first : first + tile].mT)
        p.sub_(lse[:, :, rows, None]).exp_()
        out[:, :, first : first + tile] = (p.tril_() if causal else p).sum(dim=2)
    return out


def received_from_p(q, k, lse):
    """Right, with the matrix."""
    return (q @ k.mT / math.sqrt(q.shape[-1]) - lse[..., None]).exp().tril().sum(dim=2)


@triton.jit
def received_kernel(q, k, lse, out, T, c, D: tl.constexpr, BLOCK: tl.constexpr):
    keys, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    k_ND = tl.load(k + keys[:, None] * D + columns[None, :])
    sum_N = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0) * BLOCK, T, BLOCK):
        rows = row + tl.arange(0, BLOCK)
        q_MD = tl.load(q + rows[:, None] * D + columns[None, :])
        p_MN = tl.exp(tl.dot(q_MD, k_ND.T, input_precision="ieee") * c - tl.load(lse + rows)[:, None])
        sum_N += tl.sum(tl.where(keys[None, :] <= rows[:, None], p_MN, 0.0), 0)
    tl.store(out + keys, sum_N)


def received_by_a_kernel(q, k, lse):
    out, T, D = torch.empty_like(lse), *q.shape[2:]
    received_kernel[(T // 128,)](q, k, lse, out, T, D**-0.5, D, 128)
    return out


# --- verdicts --------------------------------------------------------------------------------------------------------


ANSWERS = {
    page.first: Answers(
        right=[dq],
        wrong=[
            (functools.partial(dq, with_delta=False), "96 tokens of 16: not dQ"),
            (functools.partial(dq, scale=1.0), "96 tokens of 16: not dQ"),
            (lambda *given: dq(*given) * 2, "96 tokens of 16: not dQ"),
            (lambda *given: dq(*given)[:, :1], "96 tokens of 16: not dQ"),
            (functools.partial(dq, again=True), "right, but it reads q 5 times"),
            (lambda *given: dq(*given).clone(), "right, but it took"),
            (dq_in_torch, "right, but it took"),
            (dq_inside, "right, but no Triton kernel read q")],
    ),
    page.second: Answers(
        right=[received, received_by_a_kernel],
        wrong=[
            (functools.partial(received, causal=False), "512 keys: not the column sums of P"),
            (functools.partial(received, scaled=False), "512 keys: not the column sums of P"),
            (lambda q, k, lse: lse, "512 keys: not the column sums of P"),
            (received_from_p, "twice the keys, twice the bytes"),
            (functools.partial(received, tile=256), "right, but it took")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


# --- what the page shows ---------------------------------------------------------------------------------------------


def test_the_broken_one_hides_the_matrix_from_the_tracker_and_not_from_the_allocator():
    T = 256
    q, k, v = torch.randn(3, 1, 2, T, 16)
    torch.testing.assert_close(page.dense_inside(q, k, v), reference_attention(q, k, v))
    with memory.track(q, k, v) as t:
        page.dense_inside(q, k, v)
    assert t.peak.total - t.start.total == q.nbytes
    with memory.measure() as m:
        page.dense_inside(q, k, v)
    assert m.peak > 2 * 4 * 2 * T * T
