"""Exercises of the page *Attention of today*."""

import math

import torch

from refimpl import memory
from refimpl.attention import ScoreHook, reference_attention, tiled_attention
from refimpl.attention.kv_cache import expand

from . import exercise


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


def _close(said, expected):
    return said.shape == expected.shape and torch.allclose(said, expected, rtol=1e-4, atol=1e-5)


def _gradients(attention, q, k, v, d_out, **options):
    out = attention(q, k, v, **options)
    return out, *torch.autograd.grad(out, (q, k, v), d_out)


@exercise("parity and bytes", ScoreHook)
def first(hook):
    """Grade `hook(stride)`, which returns a ScoreHook: a query sees its own position and every stride-th one before it,
    and the scores of head h are multiplied by h + 1.

    It is given to attention in tiles, and takes the bytes of a few tiles.
    """
    T, D, sizes = 256, 8, {"query_tile": 32, "key_tile": 32}
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, 2, T, D, requires_grad=i < 3) for i in range(4))
    away, factor = torch.arange(T)[:, None] - torch.arange(T), torch.tensor([1.0, 2.0]).view(2, 1, 1)
    for stride in (1, 7):
        hidden = (away < 0) | (away % stride != 0)
        expected = _gradients(lambda q, k, v, hidden=hidden: (
            q @ k.mT * D**-0.5 * factor).masked_fill(hidden, -math.inf).softmax(-1) @ v, q, k, v, d_out)
        with memory.track(q, k, v, d_out) as t:
            said = _gradients(tiled_attention, q, k, v, d_out, score=hook(stride), **sizes)
        for name, a, b in zip(("output", "dq", "dk", "dv"), said, expected, strict=True):
            if not _close(a, b):
                forgot = "; is `derivative` there?" if name in ("dq", "dk") else ""
                return f"stride {stride}: the {name} is not that of the masked and scaled softmax{forgot}"
        took, limit = t.peak.total - t.start.total, 5 * q.nbytes + 30 * 4 * 2 * 32 * 32
        if took > limit:
            return (f"right, but it took {took:,} bytes; {limit:,} are enough: a T × S mask is {T * T:,} in "
                    "booleans, and int64 positions are 8 times that")
    return None


@exercise("parity and bytes", torch.Tensor)
def second(attend):
    """Grade `attend(q, k, v, sinks, tile)`, which returns the attention of all queries to all keys and a sink, without
    a graph. It holds the scores of one tile of keys at a time."""
    for S, level in ((200, 0.0), (1024, 40.0), (1024, -400.0)):
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, length, 16) for length in (128, S, S))
        sinks = torch.tensor([level, level + 1])
        with torch.no_grad(), memory.track(q, k, v, sinks) as t:
            said = attend(q, k, v, sinks, 64)
        if not _close(said, reference_attention(q, k, v, sinks=sinks)):
            return (f"{S:,} keys, sinks near {level:g}: not the softmax over keys and sink, without the sink's own"
                    + " (NaN)" * bool(said.isnan().any()))
        took, limit = t.peak.total - t.start.total, 8 * 4 * 2 * 128 * 64 + 8 * q.nbytes
        if took > limit:
            return f"right, but {took:,} bytes for {S:,} keys; {limit:,} are enough for any number of keys"
    return None


@exercise("parity and bytes", torch.Tensor)
def third(attend):
    """Grade `attend(q, c, k_rope, up_k, up_v)`, MLA's attention of one new token to a cache of latents, (B, H, 1, V).

    Shapes: q (B, H, 1, N + R), c (B, S, L), k_rope (B, S, R), up_k (H, N, L), up_v (H, V, L). No key and no value of a
    head is made.
    """
    B, H, S, L, R, N, V = 2, 8, 512, 32, 8, 16, 24
    torch.manual_seed(0)
    q, c, k_rope, up_k, up_v = (torch.randn(shape) / 4 for shape in (
        (B, H, 1, N + R), (B, S, L), (B, S, R), (H, N, L), (H, V, L)))
    expected = reference_attention(q, *expand(c, k_rope, up_k, up_v))
    with torch.no_grad(), memory.track(q, c, k_rope, up_k, up_v) as t:
        said = attend(q, c, k_rope, up_k, up_v)
    if not _close(said, expected):
        scale = " (the scale is 1/√(N + R))" if _close(said, reference_attention(
            q, *expand(c, k_rope, up_k, up_v), scale=(L + R) ** -0.5)) else ""
        return f"the output is not that of the expanded keys and values{scale}"
    took, keys = t.peak.total - t.start.total, 4 * B * H * S * N
    limit = keys // 2 + c.nbytes
    return None if took <= limit else (f"right, but it took {took:,} bytes: keys of all heads are {keys:,}, and "
                                       f"{limit:,} are enough")
