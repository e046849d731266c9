"""Right answers pass, wrong and unanswered ones do not."""

import functools
import math

import pytest
import torch

from refimpl import memory
from refimpl.attention import reference_attention, tiled_attention
from refimpl.exercises import attention_in_tiles as page


def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    top = lse.masked_fill(lse == -math.inf, 0)
    a, b = ((x - top).exp().unsqueeze(-1) for x in (lse_a, lse_b))
    return a * out_a + b * out_b, lse


def merge_of_sums(out_a, lse_a, out_b, lse_b):
    """Overflows."""
    a, b = lse_a.exp(), lse_b.exp()
    return (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], (a + b).log()


def merge_that_forgets_blind_rows(out_a, lse_a, out_b, lse_b):
    """−∞ − (−∞) is NaN."""
    lse = torch.logaddexp(lse_a, lse_b)
    return (lse_a - lse).exp()[..., None] * out_a + (lse_b - lse).exp()[..., None] * out_b, lse


def merge_of_stacks(out_a, lse_a, out_b, lse_b):
    """Right, with copies of both outputs."""
    outs, lses = torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b))
    lse = lses.logsumexp(dim=0)
    return ((lses - lse.masked_fill(lse == -math.inf, 0)).exp()[..., None] * outs).sum(dim=0), lse


def mean_of_halves(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


def attend(q, k, v, tile, rescale=True):
    q = q * q.shape[-1] ** -0.5
    m, out = q.new_full((*q.shape[:-1], 1), -math.inf), torch.zeros_like(q)
    total = torch.zeros_like(m)
    for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
        scores = q @ k_tile.mT
        m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
        p, shrink = scores.sub_(m_new).exp_(), (m - m_new).exp() if rescale else 1
        total, out, m = total * shrink + p.sum(dim=-1, keepdim=True), out * shrink + p @ v_tile, m_new
    return out / total


def without_a_maximum(q, k, v, tile):
    weights = [(q @ part.mT * q.shape[-1] ** -0.5).exp() for part in k.split(tile, dim=2)]
    total = sum(each.sum(dim=-1, keepdim=True) for each in weights)
    return sum(each @ part for each, part in zip(weights, v.split(tile, dim=2), strict=True)) / total


def list_of_tiles(q, k, v, tile):
    """Right, with every tile kept."""
    scores = [q @ part.mT * q.shape[-1] ** -0.5 for part in k.split(tile, dim=2)]
    m = functools.reduce(torch.maximum, [each.amax(dim=-1, keepdim=True) for each in scores])
    weights = [(each - m).exp() for each in scores]
    total = sum(each.sum(dim=-1, keepdim=True) for each in weights)
    return sum(each @ part for each, part in zip(weights, v.split(tile, dim=2), strict=True)) / total


def backward(q, k, v, out, lse, d_out, tile, *, delta=True, scaled=True, causal=True, kept=None):
    scale, T = q.shape[-1] ** -0.5, q.shape[2]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    row_sum = (out * d_out).sum(dim=-1, keepdim=True) if delta else 0
    for first in range(0, T, tile):
        keys, rows = slice(first, first + tile), slice(first if causal else 0, T)
        p = (scale * q[:, :, rows] @ k[:, :, keys].mT - lse[:, :, rows, None]).exp()
        if causal:
            p.tril_()
        if kept is not None:
            kept.append(p)
        dv[:, :, keys] = p.mT @ d_out[:, :, rows]
        ds = (d_out[:, :, rows] @ v[:, :, keys].mT - (row_sum[:, :, rows] if delta else 0)) * p
        dk[:, :, keys] = scale * ds.mT @ q[:, :, rows]
        dq[:, :, rows] += (scale if scaled else 1) * ds @ k[:, :, keys]
    return dq, dk, dv


def by_autograd(q, k, v, out, lse, d_out, tile):
    """Right, with the whole matrix."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(reference_attention(*inputs, causal=True), inputs, d_out)


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, merge), (page.second, attend), (page.third, backward)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, mean_of_halves, "plain halves: the out is not that of all keys"),
    (page.first, lambda out_a, lse_a, out_b, lse_b: (merge(out_a, lse_a, out_b, lse_b)[0], lse_a + lse_b),
     "plain halves: the logsumexp is not that of all keys"),
    (page.first, merge_of_sums, "large scores: the out is not that of all keys (NaN)"),
    (page.first, merge_that_forgets_blind_rows, "halves that some rows do not see: the out is not"),
    (page.first, merge_of_stacks, "right, but it took"),
    (page.second, functools.partial(attend, rescale=False), "1,000 keys: the output is not"),
    (page.second, without_a_maximum, "right, but"),
    (page.second, lambda q, k, v, tile: reference_attention(q, k, v), "right, but 1,"),
    (page.second, list_of_tiles, "right, but"),
    (page.second, lambda q, k, v, tile: tiled_attention(q[:, :, :64], k, v), "1,000 keys: the output is not"),
    (page.third, functools.partial(backward, delta=False), "dq is not the gradient"),
    (page.third, functools.partial(backward, scaled=False), "dq is not the gradient"),
    (page.third, functools.partial(backward, causal=False), "dq is not the gradient"),
    (page.third, lambda *args: backward(*args)[:2] + (args[5],), "dv is not the gradient"),
    (page.third, by_autograd, "right, but it took"),
    (page.third, lambda *args: backward(*args, kept=[]), "right, but it took"),
])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)


def test_a_sum_without_a_maximum_overflows(said):
    def frugal(q, k, v, tile):
        total, out = 0, 0
        for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
            p = (q @ k_tile.mT * q.shape[-1] ** -0.5).exp()
            total, out = total + p.sum(dim=-1, keepdim=True), out + p @ v_tile
        return out / total

    assert "4,096 keys: the output is not softmax(q kᵀ / √D) v (NaN)" in said(page.second, frugal)


def test_the_broken_one_is_right_and_keeps_every_weight():
    T = 256
    q, k, v = (torch.randn(1, 2, T, 16, requires_grad=True) for _ in range(3))
    expected = torch.autograd.grad(reference_attention(q, k, v).square().sum(), (q, k, v))
    with memory.track(q, k, v) as t:
        out = page.online_under_autograd(q, k, v, key_tile=32)
        assert t.now.total - t.start.total > 4 * 2 * T * T
    for ours, theirs in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
