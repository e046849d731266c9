"""Forward and backward apart: over all keys they are the attention, and over blocks of keys its parts."""

import pytest
import torch

from refimpl.attention import flash_pair, reference_attention, tiled_pair

PAIRS = {"tiled": (tiled_pair, torch.float64, 1e-12), "flash": (flash_pair, torch.float32, 2e-5),
         "flash of a dtype without kernels": (flash_pair, torch.float64, 1e-12)}


def given(dtype, causal):
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(1, heads, 24, 16, generator=generator, dtype=torch.float64).to(dtype)
                      for heads in (4, 2, 2, 4))
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = reference_attention(*inputs, causal=causal, scale=0.3, return_logsumexp=True)
    out.backward(d_out.double())
    return q, k, v, d_out, out.detach(), lse.detach(), [x.grad for x in inputs]


def far(a, b):
    return ((a.double() - b).abs().max() / b.abs().max()).item()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_over_all_keys_it_is_the_attention(name, causal):
    pair, dtype, bound = PAIRS[name]
    q, k, v, d_out, *expected, gradients = given(dtype, causal)
    found = pair.forward(q, k, v, causal=causal, scale=0.3)
    assert max(map(far, found, expected)) <= bound
    assert max(map(far, pair.backward(d_out, q, k, v, *found, causal=causal, scale=0.3), gradients)) <= bound


@pytest.mark.parametrize("name", PAIRS)
def test_over_blocks_with_the_logsumexp_of_all(name):
    """Of strided slices, too: rows of q, and keys."""
    pair, dtype, bound = PAIRS[name]
    q, k, v, d_out, out, lse, (dq, dk, dv) = given(dtype, False)
    out, lse = out.to(dtype), lse.to(torch.promote_types(dtype, torch.float32))
    options = {"causal": False, "scale": 0.3}
    (dq_1, *first), (dq_2, *second) = (pair.backward(d_out, q, k[:, :, keys], v[:, :, keys], out, lse, **options)
                                       for keys in (slice(0, 8), slice(8, 24)))
    assert far(dq_1 + dq_2, dq) <= bound
    for whole, *parts in zip((dk, dv), first, second, strict=True):
        assert far(torch.cat(parts, 2), whole) <= bound
    rows = slice(8, 24)
    some = pair.backward(*(x[:, :, rows] for x in (d_out, q)), k, v, *(x[:, :, rows] for x in (out, lse)), **options)
    assert far(some[0], dq[:, :, rows]) <= bound
    block = q, k[:, :, :8], v[:, :, :8]
    own = pair.backward(d_out, *block, *pair.forward(*block, **options), **options)
    assert far(own[1], dk[:, :, :8]) > 1e-2  # with the logsumexp of the block alone
