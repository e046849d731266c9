"""Exercises of the page *Attention in tiles*."""

import torch

from refimpl import memory
from refimpl.attention import reference_attention

from . import close, drawn, exercise, readable


def off(said, expected, right):
    """Say what is wrong with a tensor, in words that follow its name: it is not what `right` says. Returns nothing if
    it is close to what was expected."""
    if close(said, expected):
        return ""
    if said.shape != expected.shape or said.dtype != expected.dtype:
        return (f" has the shape {tuple(said.shape)} and {said.dtype}, expected {tuple(expected.shape)} and "
                f"{expected.dtype}")
    return f" is not {right}" + " (it has NaN)" * bool(readable(said) and said.isnan().any())


@exercise("parity and bytes", (torch.Tensor, torch.Tensor))
def first(attend):
    """Grade `attend(q, k, v, tile)`, which returns (out, largest), without a graph: the attention of all queries to all
    keys, and the largest weight of each row, (B, H, T).

    It holds the scores of one tile of keys at a time, so its bytes do not grow with the number of keys.
    """
    for S, scale in ((1000, 1), (4096, 30)):  # the last tile is shorter; e^score alone overflows
        q, k, v = drawn((1, 1, 128, 16), *[(1, 1, S, 16)] * 2, scale=scale)
        with torch.no_grad(), memory.track(q, k, v) as t:
            answer = attend(q, k, v, 64)
        if not isinstance(answer, (tuple, list)) or len(answer) != 2:
            return "expected a pair: the output and the largest weight of each row"
        said, largest = answer
        if not close(said, reference_attention(q, k, v)):
            return f"{S:,} keys: the output is not softmax(q kᵀ / √D) v" + " (NaN)" * bool(said.isnan().any())
        weights = (q @ k.mT / 4).softmax(dim=-1).amax(dim=-1)
        if not close(largest, weights):
            return f"{S:,} keys: the output is right, the largest weights are not: expected e^(m − L) of each row"
        took, limit = t.peak.total - t.start.total, 6 * 4 * 128 * 64 + 8 * q.nbytes
        if took > limit:
            return (f"right, but {took:,} bytes for {S:,} keys, whose scores are {4 * 128 * S:,}; {limit:,} are "
                    "enough for any number of keys")
    return None


@exercise("parity and bytes", (torch.Tensor, torch.Tensor, torch.Tensor))
def second(backward):
    """Grade `backward(q, k, v, out, lse, d_out, tile)`, which returns (dq, dk, dv) of causal attention.

    It starts from the output and the logsumexp, and takes less than a quarter of the bytes of the T × S weights.
    """
    T = 2048
    q, k, v = (x.requires_grad_() for x in drawn(*[(1, 1, T, 16)] * 3))
    out, lse = reference_attention(q, k, v, causal=True, return_logsumexp=True)
    d_out = torch.randn(out.shape)
    expected = torch.autograd.grad(out, (q, k, v), d_out)
    given = [x.detach() for x in (q, k, v, out, lse, d_out)]
    with memory.track(*given) as t:
        said = backward(*given, 64)
    for name, a, b in zip(("dq", "dk", "dv"), said, expected, strict=True):
        if not close(a, b):
            return f"{name} is not the gradient" + " (NaN)" * bool(a.isnan().any())
    took, limit = t.peak.total - t.start.total, T * T
    return None if took < limit else (f"right, but it took {took:,} bytes: expected less than a quarter of the "
                                      f"weights' {4 * T * T:,}")
