"""Exercises of the page *Attention in tiles*."""

import torch

from refimpl import memory
from refimpl.attention import reference_attention

from . import drawn, exercise, off

HINTS = {
    "first": [
        "Go through `k.split(tile, dim=2)` and `v.split(tile, dim=2)` with three running values a row: the maximum m, "
        "the sum l, the output O.",
        "When the maximum grows from m to m', multiply l and O by e^(m − m') before you add a tile's share.",
        "The largest weight of a row is e^(m − L), and L = m + ln l. So it is 1 / l."],
    "second": [
        "For a tile of keys, the weights are P = e^(S − L): from the first key's row on, with `tril` for the rest.",
        "dV = Pᵀ dO. With Δ = rowsum(dO ∘ O): dS = P ∘ (dO Vᵀ − Δ). Both are of this tile alone.",
        "dK = dSᵀ Q / √D is whole when its tile is done. dQ is the sum over tiles of dS K / √D."]}


@exercise("parity and bytes", (torch.Tensor, torch.Tensor))
def first(attend):
    """Grade `attend(q, k, v, tile)`, which returns (out, largest), without a graph: the attention of all queries to all
    keys, and the largest weight of each row, (B, H, T).

    It holds the scores of one tile of keys at a time, so its bytes do not grow with the number of keys.
    """
    # the last tile is shorter; in some rows of the second all scores are far below 0; e^score alone overflows
    for S, scale, tile in ((1000, 1, 64), (3, 100, 2), (4096, 30, 48)):
        q, k, v = drawn((1, 2, 120, 16), *[(1, 2, S, 16)] * 2, scale=scale)
        scores, out = q @ k.mT / 4, reference_attention(q, k, v)
        with torch.no_grad(), memory.track(q, k, v) as t:
            said, largest = attend(q, k, v, tile)
        case = f"{S:,} keys, scores up to {scores.amax().item():.0f}"
        if wrong := off(said, out, "softmax(q kᵀ / √D) v"):
            return f"{case}: the output{wrong}"
        if wrong := off(largest, scores.softmax(dim=-1).amax(dim=-1), "e^(m − L) of each row"):
            return f"{case}: the output is right, the largest weight{wrong}"
        took, limit = t.peak.total - t.start.total, 6 * 4 * 2 * 120 * tile + 8 * q.nbytes
        if took > limit:
            return (f"right, but {took:,} bytes for {S:,} keys, whose scores are {scores.nbytes:,}; {limit:,} are "
                    "enough for any number of keys")
    return None


@exercise("parity and bytes", (torch.Tensor, torch.Tensor, torch.Tensor))
def second(backward):
    """Grade `backward(q, k, v, out, lse, d_out, tile)`, which returns (dq, dk, dv) of causal attention.

    It starts from the output and the logsumexp, and takes less than a quarter of the bytes of the T × S weights.
    """
    for B, T, scale in ((2, 300, 30), (1, 2048, 1)):  # the last tile is shorter, and hidden scores overflow; bytes
        q, k, v = (x.requires_grad_() for x in drawn(*[(B, 2, T, 16)] * 3, scale=scale))
        out, lse = reference_attention(q, k, v, causal=True, return_logsumexp=True)
        d_out = torch.randn(out.shape)
        expected = torch.autograd.grad(out, (q, k, v), d_out)
        given = [x.detach() for x in (q, k, v, out, lse, d_out)]
        with memory.track(*given) as t:
            said = backward(*given, 64)
        for name, a, b in zip(("dq", "dk", "dv"), said, expected, strict=True):
            if wrong := off(a, b, "the gradient"):
                return f"{T:,} tokens: {name}{wrong}"
    took, weights = t.peak.total - t.start.total, 4 * B * 2 * T * T
    return None if took < weights // 4 else (f"right, but it took {took:,} bytes: expected less than a quarter of the "
                                             f"weights' {weights:,}")
