"""Right answers pass, wrong and unanswered ones do not."""

import functools
import math

import torch
from exercises_kit import Answers, graded

from exercises import attention_in_tiles as page
from refimpl.attention import reference_attention, tiled_attention


def attend(q, k, v, tile, rescale=True):
    q = q * q.shape[-1] ** -0.5
    m, out = q.new_full((*q.shape[:-1], 1), -math.inf), torch.zeros_like(q)
    total = torch.zeros_like(m)
    for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
        scores = q @ k_tile.mT
        m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
        p, shrink = scores.sub_(m_new).exp_(), (m - m_new).exp() if rescale else 1
        total, out, m = total * shrink + p.sum(dim=-1, keepdim=True), out * shrink + p @ v_tile, m_new
    return out / total, (1 / total).squeeze(-1)


def without_a_maximum(q, k, v, tile):
    weights = [(q @ part.mT * q.shape[-1] ** -0.5).exp() for part in k.split(tile, dim=2)]
    return from_tiles(weights, v, tile)


def from_tiles(weights, v, tile):
    total = sum(each.sum(dim=-1, keepdim=True) for each in weights)
    out = sum(each @ part for each, part in zip(weights, v.split(tile, dim=2), strict=True)) / total
    return out, functools.reduce(torch.maximum, [(each / total).amax(dim=-1) for each in weights])


def list_of_tiles(q, k, v, tile):
    """Right, with every tile kept."""
    scores = [q @ part.mT * q.shape[-1] ** -0.5 for part in k.split(tile, dim=2)]
    m = functools.reduce(torch.maximum, [each.amax(dim=-1, keepdim=True) for each in scores])
    return from_tiles([(each - m).exp() for each in scores], v, tile)


def dense(q, k, v, tile):
    """Right, with the whole matrix."""
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
    return weights @ v, weights.amax(dim=-1)


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


ANSWERS = {
    page.first: Answers(
        right=[attend],
        wrong=[
            (functools.partial(attend, rescale=False), "1,000 keys: the output is not"),
            (without_a_maximum, "right, but"),
            (dense, "right, but 1,"),
            (list_of_tiles, "right, but"),
            (lambda q, k, v, tile: (tiled_attention(q[:, :, :64], k, v), q), "1,000 keys: the output is not"),
            (lambda q, k, v, tile: attend(q, k, v, tile)[0], "expected a pair"),
            (lambda q, k, v, tile: (attend(q, k, v, tile)[0], q), "the largest weights are not")],
    ),
    page.second: Answers(
        right=[backward],
        wrong=[
            (functools.partial(backward, delta=False), "dq is not the gradient"),
            (functools.partial(backward, scaled=False), "dq is not the gradient"),
            (functools.partial(backward, causal=False), "dq is not the gradient"),
            (lambda *args: backward(*args)[:2] + (args[5],), "dv is not the gradient"),
            (by_autograd, "right, but it took"),
            (lambda *args: backward(*args, kept=[]), "right, but it took")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_a_sum_without_a_maximum_overflows(said):
    def frugal(q, k, v, tile):
        total, out, largest = 0, 0, torch.zeros(q.shape[:3])
        for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
            p = (q @ k_tile.mT * q.shape[-1] ** -0.5).exp()
            total, out = total + p.sum(dim=-1, keepdim=True), out + p @ v_tile
            largest = torch.maximum(largest, p.amax(dim=-1))
        return out / total, largest / total[..., 0]

    assert "4,096 keys: the output is not softmax(q kᵀ / √D) v (NaN)" in said(page.first, frugal)
