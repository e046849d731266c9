"""Attention over lists of blocks on a CUDA device: as exact as dense attention, and the bytes of the closed forms."""

import functools

import pytest
import torch
from attention_kit import gradients, inputs
from sparse_masks import check_as_exact_as_dense

from refimpl import memory
from refimpl.attention import bigbird_mask, block_sparse_attention, documents_mask, longformer_mask
from refimpl.attention.block_sparse import block_sparse_attention_bytes

MASKS = [longformer_mask(1500, 200, 3), bigbird_mask(1500, 100, 2, 2, 0, heads=4),
         documents_mask(torch.arange(1500).expand(2, -1) // 170, causal=True)]


@pytest.mark.parametrize("kernel", ["triton", "tiled"])
@pytest.mark.parametrize("seed", range(30))
def test_as_exact_as_dense_attention(seed, kernel, cuda):
    check_as_exact_as_dense(functools.partial(block_sparse_attention, kernel=kernel), seed, device=cuda)


@pytest.mark.bytes
@pytest.mark.parametrize("kernel", ["triton", "tiled"])
@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_bytes_are_the_closed_forms(mask, kernel, cuda):
    shape, keys, mask = (2, 4, 1500, 64), (2, 2, 1500, 64), mask.to(cuda)
    q, k, v, gradient = inputs(2, 4, 2, 1500, 1500, 64, torch.bfloat16, device=cuda, V=128)
    gradients(block_sparse_attention, q, k, v, gradient, mask=mask, kernel=kernel)  # compiles
    with memory.track(q, k, v, gradient, mask.words, mask.by_query.whole, mask.by_key.whole) as t:
        out = block_sparse_attention(q, k, v, mask, kernel=kernel)
        kept = t.now.total - t.start.total
        out.backward(gradient)
    form = block_sparse_attention_bytes(shape, keys, mask, torch.bfloat16, v_dim=128, kernels=kernel == "triton")
    assert form == (kept, t.peak.total - t.start.total)
