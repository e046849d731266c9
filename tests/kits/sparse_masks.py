"""Drawn masks, and attention under them by its definition: what the tests of block-sparse attention share."""

import math

import attention_kit as kit
import torch

from refimpl.attention import BlockMask

# (B, H, G, T, S)
SHAPES = [(2, 4, 2, 150, 150), (1, 4, 4, 97, 200), (2, 6, 1, 64, 64), (1, 2, 2, 200, 97), (3, 2, 1, 33, 70)]


def drawn(seed):
    """(q, k, v, gradient, mask): a mask of its own kind, with empty rows and columns, single blocks, documents."""
    draw = torch.Generator().manual_seed(seed)
    B, H, G, T, S = SHAPES[seed % len(SHAPES)]
    batch, heads = (B if seed % 2 else 1), (H if seed % 3 == 0 else 1)
    blocks = torch.rand(batch, heads, 16, 16, generator=draw) < (0.1, 0.3, 0.6)[seed % 3]  # of 16 × 16 pairs
    pairs = torch.rand(batch, heads, T, S, generator=draw) < (1.0, 0.9, 0.02)[seed // 3 % 3]
    rows, columns = torch.rand(T, generator=draw) < 0.1, torch.rand(S, generator=draw) < 0.1
    ids = torch.randint(0, 3, (max(T, S),), generator=draw).sort().values if seed % 7 == 0 else torch.zeros(max(T, S))

    def sees(b, h, i, j):
        i = i - (S - T)
        seen = blocks[b, h, i // 16, j // 16] & pairs[b, h, i, j] & ~rows[i] & ~columns[j]
        return seen & (ids[i] == ids[j])

    mask = BlockMask.of(sees, T, S, batch=batch, heads=heads, block=(32, 64, 128)[seed // 5 % 3])
    return *kit.inputs(B, H, G, T, S, 16, torch.float64, seed=seed, V=(16, 24)[seed % 2]), mask


def dense(q, k, v, mask, scale=None):
    """The definition, with the whole matrix."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = mask.expand(scores.shape)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return weights.masked_fill(~seen.any(-1, keepdim=True), 0) @ v


def check_as_exact_as_dense(attention, seed, device="cpu"):
    """Raise AssertionError unless outputs and gradients in fp32 are as near to fp64 as the definition's in fp32."""
    *given, mask = drawn(seed)
    exact = kit.gradients(dense, *given, mask=mask.dense())
    in_fp32 = [x.detach().float().requires_grad_(x.requires_grad) for x in given]
    plain = kit.gradients(dense, *in_fp32, mask=mask.dense())
    there = [x.detach().to(device).requires_grad_(x.requires_grad) for x in in_fp32]
    found = [x.cpu() for x in kit.gradients(attention, *there, mask=mask)]
    for x, as_dense, wanted, factor in zip(found, plain, exact, (2, 3, 3, 3), strict=True):
        assert (x - wanted).abs().max() <= factor * (as_dense - wanted).abs().max() + 1e-5
