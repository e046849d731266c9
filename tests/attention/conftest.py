"""What the tests of all stages share: attention pair by pair, inputs, and a meter."""

import math
from types import SimpleNamespace

import pytest
import torch

from refimpl import memory


def inputs(B=2, H=4, G=2, T=7, S=9, D=8, dtype=torch.float32, requires_grad=True, seed=0):
    """q, k, v and a gradient for the output."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, D), (B, H, T, D)
    q, k, v, gradient = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return *(x.requires_grad_(requires_grad) for x in (q, k, v)), gradient


def gradients(attention, q, k, v, gradient, **options):
    """(out, dq, dk, dv)."""
    out = attention(q, k, v, **options)
    return out, *torch.autograd.grad(out, (q, k, v), gradient)


def pairwise(q, k, v, *, causal=False, window=None, scale=None, lengths=None, key_lengths=None):
    """The definition as loops over pairs that see each other, differentiable; lengths of packed sequences."""
    (B, H, T, D), (G, S) = q.shape, k.shape[1:3]
    scale, out = D**-0.5 if scale is None else scale, []
    sequences = list(zip(lengths or [T], key_lengths or lengths or [S], strict=True))
    for b in range(B):
        for h in range(H):
            row = key = 0
            for t, s in sequences:
                for i in range(t):
                    position = i + s - t
                    seen = [j for j in range(s) if (not causal or j <= position)
                            and (window is None or abs(position - j) <= window)]
                    keys = torch.tensor([key + j for j in seen], dtype=torch.int64)
                    scores = scale * (k[b, h * G // H, keys] @ q[b, h, row + i])
                    out.append(scores.softmax(0) @ v[b, h * G // H, keys] if seen else torch.zeros_like(q[b, h, 0]))
                row, key = row + t, key + s
    return torch.stack(out).view(B, H, T, D)


def read(attention, shapes, dtype, **options):
    """(kept, peak) bytes above q, k, v and the output's gradient, by the tracker."""
    (B, H, T, D), (_, G, S, _) = shapes
    q, k, v, gradient = inputs(B, H, G, T, S, D, dtype)
    with memory.track(q, k, v, gradient) as t:
        out = attention(q, k, v, **options)
        kept = t.now.total - t.start.total
        out.backward(gradient)
    return kept, t.peak.total - t.start.total


def slope(attention, dtype=torch.float32, **options):
    """d log(peak) / d log(sequence), from 1,024 to 2,048 tokens."""
    short, long = (read(attention, ((1, 2, T, 16), (1, 1, T, 16)), dtype, causal=True, **options)[1]
                   for T in (1024, 2048))
    return math.log2(long / short)


@pytest.fixture
def kit():
    """The functions above."""
    return SimpleNamespace(inputs=inputs, gradients=gradients, pairwise=pairwise, read=read, slope=slope)
