"""Exercises of notebook 10."""

import math

import torch

from .. import memory
from ..attention import reference_attention
from . import verdict


def online_under_autograd(q_BHTD, k_BHSD, v_BHSD, key_tile=128):
    """Compute attention with an online softmax. Broken on purpose: written as an ordinary function, so autograd saves
    the tensors of each step for backward, among them the weights of every tile."""
    q_BHTD = q_BHTD * q_BHTD.shape[-1] ** -0.5
    m_BHT1 = q_BHTD.new_full((*q_BHTD.shape[:-1], 1), -math.inf)
    l_BHT1, out_BHTD = torch.zeros_like(m_BHT1), torch.zeros_like(q_BHTD)
    for k_BHsD, v_BHsD in zip(k_BHSD.split(key_tile, dim=2), v_BHSD.split(key_tile, dim=2), strict=True):
        s_BHTs = q_BHTD @ k_BHsD.mT
        m_new_BHT1 = torch.maximum(m_BHT1, s_BHTs.detach().amax(dim=-1, keepdim=True))
        p_BHTs, shrink_BHT1 = (s_BHTs - m_new_BHT1).exp(), (m_BHT1 - m_new_BHT1).exp()
        l_BHT1 = l_BHT1 * shrink_BHT1 + p_BHTs.sum(dim=-1, keepdim=True)
        out_BHTD, m_BHT1 = out_BHTD * shrink_BHT1 + p_BHTs @ v_BHsD, m_new_BHT1
    return out_BHTD / l_BHT1


def _over(q, k, v, seen_TS):
    """Return (out, logsumexp) over the keys that each query sees; zeros and −∞ for a query that sees none."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen_TS, -math.inf)
    lse = scores.logsumexp(dim=-1)
    top = lse.masked_fill(lse == -math.inf, 0)
    return (scores - top.unsqueeze(-1)).exp() @ v, lse


def _inputs(T, S, D, scale=1.0):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, D) for length in (T, S, S))
    return q * scale, k, v


def _close(said, expected):
    return torch.allclose(said, expected, rtol=1e-4, atol=1e-4 * expected[expected.isfinite()].abs().max().item())


def first(merge):
    """Grade `merge(out_a, lse_a, out_b, lse_b)`, which returns (out, lse) over the keys of both parts, a and b.

    out is (B, H, T, D) and lse (B, H, T). Where a query sees none of a part's keys, its out is 0 and its lse −∞. The
    function may take the bytes of three outputs.
    """

    def check(merge):
        everything = torch.ones(256, 256, dtype=torch.bool)
        staircase = everything.tril(-2)  # the first rows see no key at all, more of them none in the second half
        for what, scale, seen in (("plain halves", 1, everything), ("large scores", 300, everything),
                                  ("halves that some rows do not see", 1, staircase)):
            q, k, v = _inputs(256, 256, 64, scale)
            halves = [*_over(q, k[:, :, :128], v[:, :, :128], seen[:, :128]),
                      *_over(q, k[:, :, 128:], v[:, :, 128:], seen[:, 128:])]
            with memory.track(*halves) as t:
                out, lse = merge(*halves)
            for name, said, expected in zip(("out", "logsumexp"), (out, lse), _over(q, k, v, seen), strict=True):
                if said.shape != expected.shape or not _close(said, expected):
                    return f"{what}: the {name} is not that of all keys" + " (NaN)" * bool(said.isnan().any())
            took, limit = t.peak.total - t.start.total, 3 * out.nbytes + 16 * lse.nbytes
            if took > limit:
                return f"right, but it took {took:,} bytes; {limit:,} are enough"
        return None

    verdict("first", merge, check)


def second(attend):
    """Grade `attend(q, k, v, tile)`, which returns the attention of all queries to all keys, without a graph.

    It holds the scores of one tile of keys at a time, so its bytes do not grow with the number of keys.
    """

    def check(attend):
        for S, scale in ((1000, 1), (4096, 30)):  # the last tile is shorter; e^score alone overflows
            q, k, v = _inputs(128, S, 16, scale)
            with torch.no_grad(), memory.track(q, k, v) as t:
                said = attend(q, k, v, 64)
            if said.shape != q.shape or not _close(said, reference_attention(q, k, v)):
                return f"{S:,} keys: the output is not softmax(q kᵀ / √D) v" + " (NaN)" * bool(said.isnan().any())
            took, limit = t.peak.total - t.start.total, 6 * 4 * 128 * 64 + 8 * q.nbytes
            if took > limit:
                return (f"right, but {took:,} bytes for {S:,} keys, whose scores are {4 * 128 * S:,}; {limit:,} are "
                        "enough for any number of keys")
        return None

    verdict("second", attend, check)


def third(backward):
    """Grade `backward(q, k, v, out, lse, d_out, tile)`, which returns (dq, dk, dv) of causal attention.

    It starts from the output and the logsumexp, and takes less than a quarter of the bytes of the T × S weights.
    """

    def check(backward):
        T = 2048
        q, k, v = (x.requires_grad_() for x in _inputs(T, T, 16))
        out, lse = reference_attention(q, k, v, causal=True, return_logsumexp=True)
        d_out = torch.randn(out.shape)
        expected = torch.autograd.grad(out, (q, k, v), d_out)
        given = [x.detach() for x in (q, k, v, out, lse, d_out)]
        with memory.track(*given) as t:
            said = backward(*given, 64)
        for name, a, b in zip(("dq", "dk", "dv"), said, expected, strict=True):
            if a.shape != b.shape or not _close(a, b):
                return f"{name} is not the gradient" + " (NaN)" * bool(a.isnan().any())
        took, limit = t.peak.total - t.start.total, T * T
        return None if took < limit else (f"right, but it took {took:,} bytes: expected less than a quarter of the "
                                          f"weights' {4 * T * T:,}")

    verdict("third", backward, check)
