"""Exercises of the page *Attention from summaries*."""

import math

import torch

from refimpl import memory
from refimpl.attention import reference_attention

from . import close, drawn, exercise


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
    everything = torch.ones(256, 256, dtype=torch.bool)
    staircase = everything.tril(-2)  # the first rows see no key at all, more of them none in the second half
    for what, scale, seen in (("plain halves", 1, everything), ("large scores", 300, everything),
                              ("halves that some rows do not see", 1, staircase)):
        q, k, v = drawn(*[(1, 1, 256, 64)] * 3, scale=scale)
        halves = [*_over(q, k[:, :, :128], v[:, :, :128], seen[:, :128]),
                  *_over(q, k[:, :, 128:], v[:, :, 128:], seen[:, 128:])]
        with memory.track(*halves) as t:
            out, lse = merge(*halves)
        for name, said, expected in zip(("out", "logsumexp"), (out, lse), _over(q, k, v, seen), strict=True):
            if not close(said, expected):
                return f"{what}: the {name} is not that of all keys" + " (NaN)" * bool(said.isnan().any())
        took, limit = t.peak.total - t.start.total, 3 * out.nbytes + 16 * lse.nbytes
        if took > limit:
            return f"right, but it took {took:,} bytes; {limit:,} are enough"
    return None


@exercise("what is computed", torch.Tensor)
def second(attend):
    """Grade `attend(q, k, v, rows, c)`, which returns attention of `rows` queries at a time, from summaries of c keys.

    It is differentiated by autograd, and keeps the output alone. Its peak is at most a fifth of the matrix's.
    """

    def read(attend, q, k, v, d_out):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        with memory.track(*given, d_out) as t:
            out = attend(*given)
            kept = t.now.total - t.start.total
            found = out, *torch.autograd.grad(out, given, d_out)
        return found, kept, t.peak.total - t.start.total
    for T, scale, sizes in ((100, 30, (30, 16)), (1024, 1, (128, 128))):  # the first: large scores, a shorter chunk
        q, k, v = drawn(*[(1, 1, T, 64)] * 3, scale=scale)
        d_out = torch.randn(q.shape)
        found, kept, peak = read(lambda *x, sizes=sizes: attend(*x, *sizes), q, k, v, d_out)
        right, _, dense = read(reference_attention, q, k, v, d_out)
        for name, a, b in zip(("output", "dq", "dk", "dv"), found, right, strict=True):
            if not close(a, b):
                return f"{T:,} tokens: the {name} is not that of attention" + " (NaN)" * bool(a.isnan().any())
    if kept > 4 * q.nbytes:  # torch's checkpoint keeps the state of the random generator, 5 KB for each call
        return f"right, but it keeps {kept:,} bytes for backward: expected the output's {q.nbytes:,}"
    limit = dense // 5
    return None if peak <= limit else f"right, but its peak is {peak:,} bytes: {limit:,} are enough"
