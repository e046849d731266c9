"""Exercises of the page *Attention of today*."""

import math

import torch

from refimpl import memory
from refimpl.attention import ScoreHook, reference_attention, tiled_attention
from refimpl.attention.kv_cache import expand

from . import drawn, exercise, off
from .asking import Asked

HINTS = {
    "first": [
        "`q_idx - k_idx` is how far a key lies before its query, for the whole tile. Which distances are seen?",
        "Multiply the scores by `h + 1`, then use `masked_fill` with −∞ where the distance is below 0, or where "
        "`stride` does not divide it.",
        "The class says `masks = True`. Its `derivative` returns `h + 1`: the mask's own derivative is 1."],
    "second": [
        "A sink is a score without a value. Before the first tile a row has seen it: m = sink, l = 1, O = 0.",
        "For each tile: the new maximum, e^(score − new maximum), and what was summed so far times "
        "e^(old − new maximum).",
        "The first m is `sinks.view(-1, 1, 1)`, broadcast to (B, H, T, 1). In the end divide O by l."],
    "third": [
        "q · (W c) = (Wᵀ q) · c: multiply the query by `up_k`, and not the cache.",
        "The scores are the sum of two products, with `c` and with `k_rope`, times 1/√(N + R). Their softmax weighs "
        "`c`, and the result is multiplied by `up_v`.",
        "Take the heads as the rows of one matrix: (B, H, L) @ (B, L, S). Where `@` broadcasts `c` over heads, it "
        "copies `c`."]}


class MaskKeptWhole(ScoreHook):
    """Hide other documents' keys. Broken on purpose: the mask of all queries and keys is made once and kept, so that a
    tile only has to look it up."""

    masks = True

    def __init__(self, ids_BS):
        self.ids_BS, self.mask_B1TS = ids_BS, None

    def forward(self, scores, b, h, q_idx, k_idx):
        """Return the scores, −∞ between two documents."""
        if self.mask_B1TS is None:
            self.mask_B1TS = (self.ids_BS[:, :, None] != self.ids_BS[:, None])[:, None]
        return scores.masked_fill(self.mask_B1TS[:, :, q_idx, k_idx], -math.inf)


def _gradients(attention, q, k, v, d_out, **options):
    out = attention(q, k, v, **options)
    return out, *torch.autograd.grad(out, (q, k, v), d_out)


@exercise("parity and bytes", ScoreHook)
def first(hook):
    """Grade `hook(stride)`, which returns a ScoreHook: a query sees its own position and every stride-th one before it,
    and the scores of head h are multiplied by h + 1.

    It is given to attention in tiles, and takes the bytes of a few tiles.
    """
    H, T, S, sizes = 3, 160, 1024, {"query_tile": 32, "key_tile": 64}
    q, k, v = (x.requires_grad_() for x in drawn((1, H, T, 8), *[(1, H, S, 8)] * 2))
    d_out = torch.randn(q.shape)
    away, factor = torch.arange(S - T, S)[:, None] - torch.arange(S), torch.tensor([1.0, 2.0, 3.0]).view(H, 1, 1)
    for stride in (1, 7):
        hidden = (away < 0) | (away % stride != 0)
        expected = _gradients(lambda q, k, v, hidden=hidden: (
            q @ k.mT * 8**-0.5 * factor).masked_fill(hidden, -math.inf).softmax(-1) @ v, q, k, v, d_out)
        with memory.track(q, k, v, d_out) as t:
            given = hook(stride)
            said = Asked(_gradients)(tiled_attention, q, k, v, d_out, score=given, **sizes)  # it tells what raises
        for name, a, b in zip(("output", "dq", "dk", "dv"), said, expected, strict=True):
            if wrong := off(a, b, "that of the masked and scaled softmax"):
                forgot = "; is `derivative` right?" * (name in ("dq", "dk"))
                return f"stride {stride}: the {name}{wrong}{forgot}"
        if not given.masks:
            return ("right, but your hook gives −∞ and does not say `masks = True`: a hook after it could make a "
                    "hidden score finite, and nobody would notice")
        took, limit = t.peak.total - t.start.total, 2 * (q.nbytes + k.nbytes + v.nbytes) + 12 * 4 * H * 32 * 64
        if took > limit:
            return (f"right, but it took {took:,} bytes; {limit:,} are enough: a T × S mask is {T * S:,} bytes in "
                    "booleans, and int64 positions are 8 times that")
    return None


@exercise("parity and bytes", torch.Tensor)
def second(attend):
    """Grade `attend(q, k, v, sinks, tile)`, which returns the attention of all queries to all keys and a sink, without
    a graph. It holds the scores of one tile of keys at a time."""
    T, tile = 128, 64
    for S, scale, level in ((200, 1, 0.0), (1024, 1, 40.0), (1024, 1, -400.0), (1000, 30, 0.0), (1000, 30, 120.0)):
        q, k, v = drawn((2, 2, T, 16), *[(2, 2, S, 16)] * 2, scale=scale)
        sinks = torch.tensor([level, level + 1])
        expected, largest = reference_attention(q, k, v, sinks=sinks), (q @ k.mT / 4).amax().item()
        with torch.no_grad(), memory.track(q, k, v, sinks) as t:
            said = attend(q, k, v, sinks, tile)
        if wrong := off(said, expected, "e^score v, divided by the sum of e^score and e^sink"):
            return f"{S:,} keys, scores up to {largest:.0f}, sinks near {level:g}: the output{wrong}"
        took, limit = t.peak.total - t.start.total, 6 * 4 * 2 * 2 * T * tile + 8 * q.nbytes
        if took > limit:
            return f"right, but {took:,} bytes for {S:,} keys; {limit:,} are enough for any number of keys"
    return None


@exercise("parity and bytes", torch.Tensor)
def third(attend):
    """Grade `attend(q, c, k_rope, up_k, up_v)`, MLA's attention of one new token to a cache of latents, (B, H, 1, V).

    Shapes: q (B, H, 1, N + R), c (B, S, L), k_rope (B, S, R), up_k (H, N, L), up_v (H, V, L). No key and no value of a
    head is made.
    """
    for B, H, S, L, R, N, V, scale in ((2, 8, 512, 32, 8, 16, 24, 1), (1, 6, 1000, 24, 6, 20, 12, 6)):
        q, c, k_rope, up_k, up_v = drawn((B, H, 1, N + R), (B, S, L), (B, S, R), (H, N, L), (H, V, L), scale=scale)
        expected = reference_attention(q, *expand(c, k_rope, up_k, up_v))
        with torch.no_grad(), memory.track(q, c, k_rope, up_k, up_v) as t:
            said = attend(q, c, k_rope, up_k, up_v)
        if wrong := off(said, expected, "that of the expanded keys and values"):
            scales = {"no scale": 1, "1/√(L + R)": (L + R) ** -0.5, "1/√N": N**-0.5, "1/√L": L**-0.5}
            used = [f": with {name}, where the scale is 1/√(N + R)" for name, each in scales.items() if not off(
                said, reference_attention(q, *expand(c, k_rope, up_k, up_v), scale=each), "")]
            return f"{S:,} tokens, {H} heads: the output{wrong}{''.join(used)}"
        took, limit = t.peak.total - t.start.total, 4 * B * H * S * min(N, V) // 2 + c.nbytes
        if took > limit:
            made = {"keys of all heads": N, "values of all heads": V, "a copy of c for each head": L}
            return (f"right, but it took {took:,} bytes, and {limit:,} are enough; " + ", ".join(
                f"{name} are {4 * B * H * S * width:,}" for name, width in made.items()))
    return None
