"""Right answers pass, wrong and unanswered ones do not."""

import math
import os
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from exercises_kit import Answers, graded

from exercises import backward_in_triton as page
from refimpl import memory
from refimpl.attention import reference_attention

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # what overflows in an answer that is wrong
]


# --- 1: the gradient of q --------------------------------------------------------------------------------------------


@triton.jit
def dq_kernel(q, k, v, d_out, lse, delta, dq, T, scale, D: tl.constexpr, N: tl.constexpr):
    tile = tl.arange(0, N)[:, None] * D + tl.arange(0, D)[None, :]
    head, rows = tl.program_id(1) * T, tl.program_id(0) * N + tl.arange(0, N)
    here = (head + tl.program_id(0) * N) * D + tile
    q_MD, d_out_MD = tl.load(q + here), tl.load(d_out + here)
    lse_M, delta_M = tl.load(lse + head + rows), tl.load(delta + head + rows)
    dq_MD = tl.zeros([N, D], tl.float32)
    for key in range(0, T, N):
        k_ND, v_ND = tl.load(k + (head + key) * D + tile), tl.load(v + (head + key) * D + tile)
        p_MN = tl.exp(tl.dot(q_MD, k_ND.T, input_precision="ieee") * scale - lse_M[:, None])
        dp_MN = tl.dot(d_out_MD, v_ND.T, input_precision="ieee")
        dq_MD = tl.dot(p_MN * (dp_MN - delta_M[:, None]), k_ND, dq_MD, input_precision="ieee")
    tl.store(dq + here, dq_MD * scale)


def dq(q, k, v, d_out, lse, delta):
    (B, H, T, D), found = q.shape, torch.empty_like(q)
    dq_kernel[(T // 32, B * H)](q, k, v, d_out, lse, delta, found, T, D**-0.5, D, 32)
    return found


@triton.jit
def by_keys_kernel(q, k, v, d_out, lse, delta, dq, T: tl.constexpr, D: tl.constexpr, c, M: tl.constexpr,
                   WHAT: tl.constexpr):
    """Base 2, tiles of 16 queries and 32 keys, dS transposed. WHAT names a fault; "" is none."""
    rows, columns = tl.program_id(0) % (T // M) * M + tl.arange(0, M), tl.arange(0, D)
    head = tl.program_id(0) // (T // M) * T
    at_MD = (head + rows)[:, None] * D + columns[None, :]
    q_MD, d_out_MD = tl.load(q + at_MD), tl.load(d_out + at_MD)
    lse_M, delta_M = tl.load(lse + head + rows), tl.load(delta + head + rows)
    dq_MD = tl.zeros([M, D], tl.float32)
    for key in range(0, T - 32 if WHAT == "last keys" else T, 32):
        keys = key + tl.arange(0, 32)
        at_ND = (head + keys)[:, None] * D + columns[None, :]
        k_ND, v_ND = tl.load(k + at_ND), tl.load(v + at_ND)
        if WHAT == "again":
            q_MD = tl.load(q + at_MD)
        if WHAT == "d_out again":
            d_out_MD = tl.load(d_out + at_MD)
        s_NM = tl.dot(k_ND, q_MD.T, input_precision="ieee") * c
        p_NM = tl.exp(s_NM) if WHAT == "no lse" else tl.exp2(1.4426950408889634 * (s_NM - lse_M[None, :]))
        if WHAT == "causal":
            p_NM = tl.where(keys[:, None] <= rows[None, :], p_NM, 0.0)
        dp_NM = tl.dot(v_ND, d_out_MD.T, input_precision="ieee")
        ds_NM = p_NM * dp_NM if WHAT == "no delta" else p_NM * (dp_NM - delta_M[None, :])
        if WHAT == "plus delta":
            ds_NM = p_NM * (dp_NM + delta_M[None, :])
        if WHAT == "v":
            k_ND = v_ND
        part_MD = tl.dot(ds_NM.T, k_ND, input_precision="ieee")
        dq_MD = part_MD if WHAT == "last tile" else dq_MD + part_MD
    if WHAT == "in place":
        tl.store(q + at_MD, dq_MD * c)
    tl.store(dq + at_MD, dq_MD if WHAT == "no scale" else dq_MD * c)


def by_keys(q, k, v, d_out, lse, delta, what="", c=None):
    (B, H, T, D), found = q.shape, q.new_empty(q.shape)
    by_keys_kernel[B * H * T // 16,](q, k, v, d_out, lse, delta, found, T, D, c or D**-0.5, 16, what)
    return found


@triton.jit
def whole_rows_kernel(q, k, v, d_out, lse, delta, dq, c, T: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr):
    """One program holds 32 queries and all keys of their head."""
    rows, keys, columns = tl.program_id(1) * 32 + tl.arange(0, 32), tl.arange(0, PADDED), tl.arange(0, D)
    head, here = tl.program_id(0) * T, keys < T
    at_MD, at_ND = (head + rows)[:, None] * D + columns[None, :], (head + keys)[:, None] * D + columns[None, :]
    k_ND, v_ND = tl.load(k + at_ND, mask=here[:, None], other=0.0), tl.load(v + at_ND, mask=here[:, None], other=0.0)
    s_MN = c * tl.dot(tl.load(q + at_MD), tl.trans(k_ND), input_precision="ieee")
    p_MN = tl.where(here[None, :], tl.exp(s_MN - tl.load(lse + head + rows)[:, None]), 0.0)
    dp_MN = tl.dot(tl.load(d_out + at_MD), tl.trans(v_ND), input_precision="ieee")
    ds_MN = c * p_MN * (dp_MN - tl.load(delta + head + rows)[:, None])
    tl.store(dq + at_MD, tl.dot(ds_MN, k_ND, input_precision="ieee"))


def with_whole_rows(q, k, v, d_out, lse, delta):
    (B, H, T, D), found = q.shape, torch.empty(q.shape, device=q.device)
    whole_rows_kernel[B * H, T // 32](q, k, v, d_out, lse, delta, found, D**-0.5, T, D, triton.next_power_of_2(T))
    return found


def dq_in_torch(q, k, v, d_out, lse, delta):
    """Right, with the matrix."""
    p = (q @ k.mT * q.shape[-1] ** -0.5 - lse[..., None]).exp()
    return p * (d_out @ v.mT - delta[..., None]) @ k * q.shape[-1] ** -0.5


@torch.library.custom_op("refimpl_tests::dq_inside", mutates_args=())
def dq_inside(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, lse: torch.Tensor,
              delta: torch.Tensor) -> torch.Tensor:
    return dq_in_torch(q, k, v, d_out, lse, delta)


def freed(*given):
    found = dq(*given)
    found.untyped_storage().resize_(0)
    return found


# --- 2: attention received -------------------------------------------------------------------------------------------


def received(q, k, lse):
    parts = []
    for first in range(0, k.shape[2], 64):  # earlier queries do not see these keys
        s = q[:, :, first:] @ k[:, :, first : first + 64].mT * q.shape[-1] ** -0.5
        parts.append((s - lse[:, :, first:, None]).exp().tril().sum(dim=2))
    return torch.cat(parts, dim=2)


def received_by_queries(q, k, lse):
    """Tiles of queries add to all keys so far."""
    total = torch.zeros(k.shape[:3], device=k.device)
    for first in range(0, q.shape[2], 32):
        rows, end = slice(first, first + 32), first + 32
        p = torch.einsum("bhtd,bhsd->bhts", q[:, :, rows], k[:, :, :end]).mul_(q.shape[-1] ** -0.5)
        total[:, :, :end] += p.sub_(lse[:, :, rows, None]).exp_().tril_(first).sum(dim=2)
    return total


@triton.jit
def received_kernel(q, k, lse, out, T, c, D: tl.constexpr, BLOCK: tl.constexpr):
    keys, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    head = tl.program_id(1) * T
    k_ND = tl.load(k + (head + keys)[:, None] * D + columns[None, :])
    sum_N = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0) * BLOCK, T, BLOCK):
        rows = row + tl.arange(0, BLOCK)
        q_MD = tl.load(q + (head + rows)[:, None] * D + columns[None, :])
        s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee") * c
        p_MN = tl.exp(s_MN - tl.load(lse + head + rows)[:, None])
        sum_N += tl.sum(tl.where(keys[None, :] <= rows[:, None], p_MN, 0.0), 0)
    tl.store(out + head + keys, sum_N)


def received_by_a_kernel(q, k, lse):
    out, (B, H, T, D) = torch.empty_like(lse), q.shape
    received_kernel[T // 64, B * H](q, k, lse, out, T, D**-0.5, D, 64)
    return out


def tiles(q, k, lse, tile=64, causal=True, scale=None, diagonal=0, tail=True, dim=2, weights=None):
    T, out = q.shape[2], k.new_zeros(k.shape[:3])
    for first in range(0, T if tail else T - tile, tile):
        rows = slice(first if causal else 0, T)
        s = (scale or q.shape[-1] ** -0.5) * q[:, :, rows] @ k[:, :, first : first + tile].mT
        p = weights(s, lse[:, :, rows, None]) if weights else (s - lse[:, :, rows, None]).exp_()
        out[:, :, first : first + tile] = (p.tril_(diagonal) if causal else p).sum(dim=dim)[:, :, :tile]
    return out


def received_from_p(q, k, lse):
    """Right, with the matrix."""
    return (q @ k.mT / math.sqrt(q.shape[-1]) - lse[..., None]).exp().tril().sum(dim=2)


def scaled_in_place(q, k, lse):
    return tiles(q.mul_(q.shape[-1] ** -0.5), k, lse, scale=1.0)


# --- verdicts --------------------------------------------------------------------------------------------------------


ANSWERS = {
    page.first: Answers(
        right=[dq, by_keys, with_whole_rows],
        wrong=[
            (partial(by_keys, what="no delta"), "96 tokens of 16: not dQ: a number is"),
            (partial(by_keys, what="plus delta"), "96 tokens of 16: not dQ: a number is"),
            (partial(by_keys, what="no scale"), "96 tokens of 16: not dQ: the factor 1/√D is missing"),
            (partial(by_keys, c=1.0), "96 tokens of 16: not dQ: a number is"),
            (partial(by_keys, c=0.25), "160 tokens of 32: not dQ"),
            (partial(by_keys, what="no lse"), "96 tokens of 16: not dQ: a number is"),
            (partial(by_keys, what="causal"), "96 tokens of 16: not dQ: a number is"),
            (partial(by_keys, what="v"), "96 tokens of 16: not dQ: a number is"),
            (partial(by_keys, what="last keys"), "96 tokens of 16: not dQ: a number is"),
            (partial(by_keys, what="last tile"), "96 tokens of 16: not dQ: a number is"),
            (partial(by_keys, what="in place"), "your function changes q"),
            (lambda *given: dq(*given) * 2, "96 tokens of 16: not dQ: a number is"),
            (lambda *given: dq(*given)[:, :1], "not dQ: it is (1, 1, 96, 16) in torch.float32, expected (1, 2,"),
            (lambda *given: dq(*given).mT, "not dQ: it is (1, 2, 16, 96) in torch.float32"),
            (freed, "its storage was freed"),
            (partial(by_keys, what="again"), "right, but it reads q 4 times"),
            (partial(by_keys, what="d_out again"), "right, but it reads d_out 4 times"),
            (lambda *given: dq(*given).clone(), "right, but it took 24,576 bytes: expected 12,288, the gradient"),
            (dq_inside, "right, but no Triton kernel read q and d_out")],
        saves_nothing=(dq_in_torch, "right, but it took"),
    ),
    page.second: Answers(
        right=[received, received_by_queries, received_by_a_kernel],
        wrong=[
            (partial(tiles, causal=False), "not the column sums of P: queries before a key do not see it"),
            (partial(tiles, scale=1.0), "2 × 3 heads, 192 keys of 32: not the column sums of P: a number is"),
            (partial(tiles, scale=0.25), "2 × 3 heads, 192 keys of 32: not the column sums of P: a number is"),
            (partial(tiles, diagonal=-1), "192 keys of 32: not the column sums of P: a number is"),
            (partial(tiles, diagonal=1), "192 keys of 32: not the column sums of P: a number is"),
            (partial(tiles, tail=False), "192 keys of 32: not the column sums of P: a number is"),
            (partial(tiles, dim=3), "192 keys of 32: not the column sums of P: a number is"),
            (partial(tiles, weights=lambda s, lse: s.softmax(dim=-1)), "192 keys of 32: not the column sums of P"),
            (partial(tiles, weights=lambda s, lse: s.exp() / lse.exp()), "1,024 keys of 16: not the column sums of P: "
                                                                         "it has NaN: an exp that overflows"),
            (lambda q, k, lse: lse, "192 keys of 32: not the column sums of P: a number is"),
            (lambda q, k, lse: torch.ones_like(lse), "192 keys of 32: not the column sums of P: a number is"),
            (lambda q, k, lse: received(q[:, :1], k[:, :1], lse[:, :1]).expand(lse.shape), "not the column sums of P"),
            (lambda q, k, lse: received(q, k, lse) / k.shape[2], "not the column sums of P: a number is"),
            (lambda q, k, lse: received(q, k, lse).sum(dim=1), "it is (2, 192) in torch.float32, expected (2, 3, 192)"),
            (scaled_in_place, "your function changes q"),
            (partial(tiles, tile=256), "right, but it took")],
        saves_nothing=(received_from_p, "twice the keys, twice the bytes"),
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
