"""Exercises of the page *Attention from summaries*."""

import math

import torch

from refimpl import memory
from refimpl.attention import reference_attention

from . import drawn, exercise, off, readable
from .asking import Asked

HINTS = {
    "first": [
        "`torch.logaddexp(lse_a, lse_b)` is the logsumexp L over both, and is −∞ where both are.",
        "The output is e^(L_a − L) O_a + e^(L_b − L) O_b: the same shares of both parts for all D numbers of a row.",
        "−∞ − (−∞) is NaN. Where L is −∞, subtract 0 in its place: `lse.masked_fill(lse == -math.inf, 0)`."],
    "second": [
        "Take `rows` queries at a time with `q.split(rows, dim=2)`, and join their outputs with `torch.cat`.",
        "Of each chunk of c keys a row needs its maximum m, its sum l and its output O. The share of a chunk is "
        "e^(m − the largest m).",
        "Call both functions by `checkpoint(…, use_reentrant=False)`: the one for some queries, and inside it the one "
        "for a chunk of keys."]}


def _over(q, k, v, seen_TS):
    """Return (out, logsumexp) over the keys that each query sees; zeros and −∞ for a query that sees none."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen_TS, -math.inf)
    lse = scores.logsumexp(dim=-1)
    top = lse.masked_fill(lse == -math.inf, 0)
    return (scores - top.unsqueeze(-1)).exp() @ v, lse


@exercise("parity and bytes", (torch.Tensor, torch.Tensor))
def first(merge):
    """Grade `merge(out_a, lse_a, out_b, lse_b)`, which returns (out, lse) over the keys of both parts, a and b.

    out is (B, H, T, D) and lse (B, H, T). Where a query sees none of a part's keys, its out is 0 and its lse −∞. The
    function may take the bytes of three outputs.
    """
    T, A, S = 120, 90, 240  # tokens; keys of part a; of both
    everything = torch.ones(T, S, dtype=torch.bool)
    blind = everything.clone()
    blind[10:50, :A] = blind[40:70, A:] = False
    for what, scale, seen in (("parts of 90 and 150 keys", 1, everything), ("large scores", 100, everything),
                              ("parts that some rows do not see", 1, blind)):
        q, k, v = drawn((2, 3, T, 64), *[(2, 3, S, 64)] * 2, scale=scale)
        parts = [*_over(q, k[:, :, :A], v[:, :, :A], seen[:, :A]), *_over(q, k[:, :, A:], v[:, :, A:], seen[:, A:])]
        with memory.track(*parts) as t:
            said = merge(*parts)
        for name, a, expected in zip(("out", "logsumexp"), said, _over(q, k, v, seen), strict=True):
            if wrong := off(a, expected, "that of all keys"):
                return f"{what}: the {name}{wrong}"
        took, limit = t.peak.total - t.start.total, 3 * parts[0].nbytes + 16 * parts[1].nbytes
        if took > limit:
            return f"right, but it took {took:,} bytes; {limit:,} are enough, and an output is {parts[0].nbytes:,}"
    return None


def _read(attend, q, k, v, d_out):
    """Return ((out, dq, dk, dv), bytes that wait for backward, bytes at the peak); without a graph only the output."""
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    with memory.track(*given, d_out) as t:
        out = attend(*given)
        kept, found = t.now.total - t.start.total, (out,)
        if out.requires_grad and out.shape == q.shape and readable(out):
            found = out, *Asked(torch.autograd.grad)(out, given, d_out, materialize_grads=True)
    return found, kept, t.peak.total - t.start.total


@exercise("parity and bytes", torch.Tensor)
def second(attend):
    """Grade `attend(q, k, v, rows, c)`, which returns attention of `rows` queries at a time, from summaries of c keys.

    It is differentiated by autograd, and keeps the output alone. Its peak is at most a fifth of the matrix's.
    """
    for shape, scale, sizes in (((2, 3, 100, 32), 30, (30, 16)),  # large scores, a shorter chunk
                                ((1, 1, 1024, 64), 1, (128, 128))):
        q, k, v = drawn(*[shape] * 3, scale=scale)
        d_out = torch.randn(q.shape)
        found, kept, peak = _read(lambda *x, sizes=sizes: attend(*x, *sizes), q, k, v, d_out)
        right, _, dense = _read(reference_attention, q, k, v, d_out)
        for name, a, b in zip(("output", "dq", "dk", "dv"), found, right, strict=False):
            if wrong := off(a, b, "that of attention"):
                return f"{shape[2]:,} tokens: the {name}{wrong}"
        if len(found) == 1:
            return f"{shape[2]:,} tokens: the output is right, and has no graph: autograd cannot differentiate it"
    limit = 3 * q.nbytes  # a scaled copy of q, say, and 5 KB of the random generator's state for each checkpoint
    if kept > limit:
        return f"right, but {kept:,} bytes wait for backward; {limit:,} are enough, and the output is {q.nbytes:,}"
    return None if peak <= dense // 5 else f"right, but its peak is {peak:,} bytes: {dense // 5:,} are enough"
