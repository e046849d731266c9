"""Right answers pass, wrong and unanswered ones do not."""

import functools
import math

import torch
from exercises_kit import Answers, graded

from exercises import attention_in_tiles as page
from refimpl.attention import reference_attention, tiled_attention

# --- first -----------------------------------------------------------------------------------------------------------


def attend(q, k, v, tile):
    q = q * q.shape[-1] ** -0.5
    m = q.new_full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(m), torch.zeros_like(q)
    for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
        scores = q @ k_tile.mT
        m_new = torch.maximum(m, scores.amax(dim=-1, keepdim=True))
        p, shrink = (scores - m_new).exp(), (m - m_new).exp()
        total, out, m = total * shrink + p.sum(dim=-1, keepdim=True), out * shrink + p @ v_tile, m_new
    return out / total, (1 / total).squeeze(-1)


def attend_in_two_passes(q, k, v, tile):
    q, lse, top = q / math.sqrt(q.shape[-1]), None, None
    for k_tile in k.split(tile, dim=2):
        s = q @ k_tile.transpose(-2, -1)
        here, most = s.logsumexp(-1), s.max(-1).values
        lse, top = (here, most) if lse is None else (torch.logaddexp(lse, here), torch.maximum(top, most))
    out = torch.zeros_like(q)
    for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
        out += torch.exp(q @ k_tile.transpose(-2, -1) - lse[..., None]) @ v_tile
    return out, (top - lse).exp()


def attend_by_the_library(q, k, v, tile):
    out, lse = tiled_attention(q, k, v, query_tile=tile, key_tile=tile, return_logsumexp=True)
    tops = [(q @ part.mT).amax(dim=-1) for part in k.split(tile, dim=2)]
    return [out, (functools.reduce(torch.maximum, tops) * q.shape[-1] ** -0.5 - lse).exp()]


def attend_with_fault(q, k, v, tile, *, rescale=True, scale=None, start=-math.inf, tiles=None, top=torch.maximum,
                      largest=lambda m, total: 1 / total.squeeze(-1)):
    q = q * (scale or q.shape[-1] ** -0.5)
    m, out = q.new_full((*q.shape[:-1], 1), start), torch.zeros_like(q)
    total = torch.zeros_like(m)
    for k_tile, v_tile in list(zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True))[:tiles]:
        scores = q @ k_tile.mT
        m_new = top(m, scores.amax(dim=-1, keepdim=True))
        p, shrink = scores.sub_(m_new).exp_(), (m - m_new).exp() if rescale else 1
        total, out, m = total * shrink + p.sum(dim=-1, keepdim=True), out * shrink + p @ v_tile, m_new
    return out / total, largest(m, total)


def whole_tiles_alone(q, k, v, tile):
    """Leaves out the last keys, where they do not fill a tile."""
    whole = k.shape[2] // tile * tile
    return attend(q, k[:, :, :whole], v[:, :, :whole], tile)


def without_a_maximum(q, k, v, tile):
    total, out, largest = 0, 0, torch.zeros(q.shape[:3])
    for k_tile, v_tile in zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True):
        p = (q @ k_tile.mT * q.shape[-1] ** -0.5).exp()
        total, out = total + p.sum(dim=-1, keepdim=True), out + p @ v_tile
        largest = torch.maximum(largest, p.amax(dim=-1))
    return out / total, largest / total[..., 0]


def without_its_bytes(q, k, v, tile):
    out, largest = attend(q, k, v, tile)
    out.untyped_storage().resize_(0)
    return out, largest


def of_no_queries(q, k, v, tile):
    """Sets the grader's queries to 0, too."""
    return attend(q.zero_(), k, v, tile)


def mean_of_tiles(q, k, v, tile):
    """Takes the softmax of each tile by itself."""
    tiles = list(zip(k.split(tile, dim=2), v.split(tile, dim=2), strict=True))
    weights = [(q @ part.mT * q.shape[-1] ** -0.5).softmax(dim=-1) for part, _ in tiles]
    out = sum(p @ part for p, (_, part) in zip(weights, tiles, strict=True)) / len(tiles)
    return out, functools.reduce(torch.maximum, [p.amax(dim=-1) for p in weights])


def list_of_tiles(q, k, v, tile):
    """Right, with every tile kept."""
    scores = [q @ part.mT * q.shape[-1] ** -0.5 for part in k.split(tile, dim=2)]
    m = functools.reduce(torch.maximum, [each.amax(dim=-1, keepdim=True) for each in scores])
    weights = [(each - m).exp() for each in scores]
    total = sum(each.sum(dim=-1, keepdim=True) for each in weights)
    out = sum(each @ part for each, part in zip(weights, v.split(tile, dim=2), strict=True)) / total
    return out, functools.reduce(torch.maximum, [(each / total).amax(dim=-1) for each in weights])


def dense(q, k, v, tile):
    """Right, with the whole matrix."""
    weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(dim=-1)
    return weights @ v, weights.amax(dim=-1)


# --- second ----------------------------------------------------------------------------------------------------------


def backward(q, k, v, out, lse, d_out, tile):
    scale = q.shape[-1] ** -0.5
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = (out * d_out).sum(dim=-1, keepdim=True)
    for first in range(0, q.shape[2], tile):
        keys, rows = slice(first, first + tile), slice(first, None)
        p = (scale * q[:, :, rows] @ k[:, :, keys].mT - lse[:, :, rows, None]).exp().tril()
        ds = p * (d_out[:, :, rows] @ v[:, :, keys].mT - delta[:, :, rows])
        dv[:, :, keys] = p.mT @ d_out[:, :, rows]
        dk[:, :, keys] = scale * ds.mT @ q[:, :, rows]
        dq[:, :, rows] += scale * ds @ k[:, :, keys]
    return dq, dk, dv


def backward_by_queries(q, k, v, out, lse, d_out, tile):
    T = q.shape[2]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for a in range(0, T, tile):
        b = min(a + tile, T)
        own, seen = q[:, :, a:b] / math.sqrt(q.shape[-1]), k[:, :, :b]
        p = torch.exp(own @ seen.transpose(2, 3) - lse[:, :, a:b].unsqueeze(-1)).tril_(a)
        dv[:, :, :b] += p.transpose(2, 3) @ d_out[:, :, a:b]
        dp = d_out[:, :, a:b] @ v[:, :, :b].transpose(2, 3)
        ds = p.mul_(dp.sub_((out[:, :, a:b] * d_out[:, :, a:b]).sum(-1, keepdim=True)))
        dk[:, :, :b] += ds.transpose(2, 3) @ own
        dq[:, :, a:b] = ds @ seen / math.sqrt(q.shape[-1])
    return dq, dk, dv


def backward_by_pairs(q, k, v, out, lse, d_out, tile):
    """A loop over both: no tile above the diagonal is made."""
    cut = [x.split(tile, dim=2) for x in (q, k, v, lse[..., None], d_out, (out * d_out).sum(-1, keepdim=True))]
    n, scale = len(cut[0]), q.shape[-1] ** -0.5
    found = [[torch.zeros_like(x) for x in each] for each in cut[:3]]
    for i in range(n):
        for j in range(i + 1):
            rows, keys, values, level, d, delta = (x[at] for x, at in zip(cut, (i, j, j, i, i, i), strict=True))
            s = rows @ keys.mT * scale
            if i == j:
                s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
            p = (s - level).exp()
            ds = p * (d @ values.mT - delta) * scale
            found[0][i] += ds @ keys
            found[1][j] += ds.mT @ rows
            found[2][j] += p.mT @ d
    return [torch.cat(each, dim=2) for each in found]


def backward_with_fault(q, k, v, out, lse, d_out, tile, *, delta=True, scaled=True, scaled_k=True, first_key=True,
                        hide=lambda p: p.tril(), kept=None, add=True, leave=0, level=True):
    scale, T = q.shape[-1] ** -0.5, q.shape[2]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    row_sum = (out * d_out if delta is True else out).sum(dim=-1, keepdim=True) * bool(delta)
    for first in range(0, T - leave, tile):
        keys, rows = slice(first, first + tile), slice(first if first_key else 0, T)
        p = hide((scale * q[:, :, rows] @ k[:, :, keys].mT - level * lse[:, :, rows, None]).exp())
        if kept is not None:
            kept.append(p)
        dv[:, :, keys] = p.mT @ d_out[:, :, rows]
        ds = (d_out[:, :, rows] @ v[:, :, keys].mT - row_sum[:, :, rows]) * p
        dk[:, :, keys] = (scale if scaled_k else 1) * ds.mT @ q[:, :, rows]
        dq[:, :, rows] = add * dq[:, :, rows] + (scale if scaled else 1) * ds @ k[:, :, keys]
    return dq, dk, dv


def times_a_mask(p):
    return p * torch.ones(p.shape[-2:]).tril()


def by_autograd(q, k, v, out, lse, d_out, tile):
    """Right, with the whole matrix."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(reference_attention(*inputs, causal=True), inputs, d_out)


fault, fault_b = (functools.partial(functools.partial, each) for each in (attend_with_fault, backward_with_fault))
ANSWERS = {
    page.first: Answers(
        right=[attend, attend_in_two_passes, attend_by_the_library],
        wrong=[
            (fault(rescale=False), "1,000 keys, scores up to 5: the output is not softmax(q kᵀ / √D) v"),
            (fault(scale=1), "1,000 keys, scores up to 5: the output is not"),
            (fault(scale=16**-1), "1,000 keys, scores up to 5: the output is not"),
            (fault(start=0.0), "3 keys, scores up to"),
            (fault(tiles=-1), "1,000 keys, scores up to 5: the output is not"),
            (fault(tiles=1), "1,000 keys, scores up to 5: the output is not"),
            (fault(top=lambda m, new: new), "1,000 keys, scores up to 5: the output is right, the largest weight"),
            (whole_tiles_alone, "1,000 keys, scores up to 5: the output is not"),
            (without_a_maximum, "scores up to 323: the output is not softmax(q kᵀ / √D) v (it has"),
            (without_its_bytes, "1,000 keys, scores up to 5: the output is not"),
            (of_no_queries, "1,000 keys, scores up to 5: the output is not"),
            (mean_of_tiles, "1,000 keys, scores up to 5: the output is not"),
            (fault(largest=lambda m, total: m.squeeze(-1)), "the output is right, the largest weight is not e^(m − L)"),
            (fault(largest=lambda m, total: (m.exp() / total).squeeze(-1)), "the largest weight is not e^(m − L)"),
            (fault(largest=lambda m, total: total.squeeze(-1)), "the largest weight is not e^(m − L)"),
            (fault(largest=lambda m, total: 1 / total),
             "the largest weight has the shape (1, 2, 120, 1) and torch.float32, expected (1, 2, 120)"),
            (lambda q, k, v, tile: attend(q, k, v, tile)[0], "expected 2 values (a tensor, a tensor)"),
            (lambda q, k, v, tile: attend(q, k, v, tile)[::-1], "the output has the shape"),
            (lambda q, k, v, tile: attend(q, k, v, 1000), "right, but"),
            (list_of_tiles, "right, but")],
        saves_nothing=(dense, "are enough for any number of keys"),
        same=("m, scores.amax(dim=-1, keepdim=True) → scores.amax(dim=-1, keepdim=True), m",),
    ),
    page.second: Answers(
        right=[backward, backward_by_queries, backward_by_pairs],
        wrong=[
            (fault_b(delta=None), "300 tokens: dq is not the gradient"),
            (fault_b(delta="of the output alone"), "300 tokens: dq is not the gradient"),
            (fault_b(scaled=False), "300 tokens: dq is not the gradient"),
            (fault_b(scaled_k=False), "300 tokens: dk is not the gradient"),
            (fault_b(first_key=False, hide=lambda p: p), "300 tokens: dq is not the gradient"),
            (fault_b(first_key=False), "300 tokens: dq is not the gradient"),
            (fault_b(hide=lambda p: p), "300 tokens: dq is not the gradient"),
            (fault_b(hide=lambda p: p.tril(-1)), "300 tokens: dq is not the gradient"),
            (fault_b(hide=lambda p: p.tril(1)), "300 tokens: dq is not the gradient"),
            (fault_b(hide=times_a_mask), "300 tokens: dq is not the gradient (it has NaN)"),
            (fault_b(add=False), "300 tokens: dq is not the gradient"),
            (fault_b(leave=63), "300 tokens: dq is not the gradient"),
            (fault_b(level=False), "300 tokens: dq is not the gradient"),
            (lambda *args: (backward(*args)[0], *backward(*args)[:0:-1]), "300 tokens: dk is not the gradient"),
            (lambda *args: (*backward(*args)[:2], args[5]), "300 tokens: dv is not the gradient"),
            (lambda *args: backward(*args)[:2], "expected 3 values (a tensor, a tensor, a tensor)"),
            (lambda *args: backward(*args[:-1], args[0].shape[2]), "right, but it took"),
            (lambda *args: backward_with_fault(*args, kept=[]), "right, but it took")],
        saves_nothing=(by_autograd, "expected less than a quarter of the weights' 33,554,432"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
