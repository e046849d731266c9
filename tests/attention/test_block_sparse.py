"""Attention over lists of blocks: as exact as dense attention under the same mask, for FLOPs and bytes of blocks."""

import functools
import math

import attention_kit as kit
import pytest
import torch
from sparse_masks import check_as_exact_as_dense, dense, drawn
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory
from refimpl.attention import Alibi, ScoreHook, Softcap, alibi_slopes, tiled_attention
from refimpl.attention.block_sparse import (
    block_sparse_attention,
    block_sparse_attention_bytes,
    block_sparse_attention_flops,
)
from refimpl.attention.masks import BlockMask, bigbird_mask, causal_mask, documents_mask, longformer_mask

DRAWN = 300
TILED = functools.partial(block_sparse_attention, kernel="tiled")


@pytest.mark.parametrize("seed", range(30))
def test_as_exact_as_dense_attention(seed):
    check_as_exact_as_dense(TILED, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("seeds", [range(first, first + 30) for first in range(30, DRAWN, 30)], ids=str)
def test_as_exact_as_dense_attention_on_more_masks(seeds):
    for seed in seeds:
        check_as_exact_as_dense(TILED, seed)


def test_the_drawn_masks_have_what_they_are_drawn_for():
    masks = [drawn(seed)[-1] for seed in range(30)]
    assert any((mask.kinds() > 0).sum((2, 3)).min() == 0 for mask in masks), "a list without a block"
    assert all(any(not mask.dense().any(dim).all() for mask in masks) for dim in (-1, -2)), "an empty row, and column"
    assert {mask.shape[:2] for mask in masks} >= {(1, 1), (1, 4), (2, 1), (2, 4)}


@pytest.mark.parametrize("score", [Softcap(1.5), [Softcap(2.0), Alibi(alibi_slopes(4))]], ids=["one", "two"])
@pytest.mark.parametrize("heads", [1, 4])
def test_hooks_see_the_places_of_the_pairs(score, heads):
    mask = bigbird_mask(150, 9, 1, 1, 0, heads=heads, causal=True, block=32)

    class Masked(ScoreHook):
        masks = True

        def forward(self, scores, b, h, q_idx, k_idx):
            return scores.masked_fill(~mask.sees(b, h * (heads > 1), q_idx, k_idx), -math.inf)

    given = kit.inputs(2, 4, 2, 150, 150, dtype=torch.float64)
    hooks = score if isinstance(score, list) else [score]
    wanted = kit.gradients(tiled_attention, *given, score=[*hooks, Masked()])
    for x, y in zip(kit.gradients(TILED, *given, mask=mask, score=score), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_an_attn_mask_is_cut_once_and_again_when_it_was_written_to(monkeypatch):
    given, cuts = kit.inputs(2, 4, 2, 70, 90), []
    of = BlockMask.of
    monkeypatch.setattr(BlockMask, "of", lambda *a, **k: cuts.append(1) or of(*a, **k))
    seen = torch.rand(2, 1, 70, 90) < 0.3
    for _ in range(3):
        out = TILED(*given[:3], seen)
    assert len(cuts) == 1
    torch.testing.assert_close(out, dense(*given[:3], seen))
    added = torch.zeros(70, 90).masked_fill_(~seen[0, 0], -math.inf)
    torch.testing.assert_close(TILED(*given[:3], added), dense(*given[:3], seen[:1]))
    added.masked_fill_(added < 0, torch.finfo(torch.float32).min)  # as transformers writes it
    torch.testing.assert_close(TILED(*given[:3], added), dense(*given[:3], seen[:1]))
    seen.logical_not_()
    torch.testing.assert_close(TILED(*given[:3], seen), dense(*given[:3], seen))
    assert len(cuts) == 4


def test_an_attn_mask_that_would_get_no_gradient_or_has_no_values_is_refused():
    q, k, v, _ = kit.inputs(1, 2, 2, 40, 40)
    with pytest.raises(ValueError, match="an attn_mask that needs a gradient"):
        TILED(q, k, v, torch.zeros(40, 40, requires_grad=True))
    with pytest.raises(ValueError, match="or of a dry run, without values"):
        memory.dry_run(TILED, q, k, v, torch.ones(40, 40, dtype=torch.bool))


def test_an_attn_mask_that_broadcasts_is_cut_for_each_length():
    keys = torch.rand(1, 90) < 0.5
    for T in (70, 40):
        given = kit.inputs(2, 4, 2, T, 90)
        torch.testing.assert_close(TILED(*given[:3], keys), dense(*given[:3], keys.expand(T, 90)))
    with torch.inference_mode():
        mine, given = keys.clone(), kit.inputs(2, 4, 2, 40, 90, requires_grad=False)
        for _ in range(2):
            torch.testing.assert_close(TILED(*given[:3], mine), dense(*given[:3], mine.expand(40, 90)))
            mine.logical_not_()


def test_the_logsumexp_is_that_of_the_pairs_seen():
    q, k, v, _ = kit.inputs(1, 2, 2, 100, 100, dtype=torch.float64)
    mask = BlockMask.of(lambda b, h, i, j: (j <= i) & (i > 40), 100, block=32)
    out, lse = block_sparse_attention(q, k, v, mask, return_logsumexp=True)
    scores = (q @ k.mT * 8**-0.5).masked_fill(~mask.dense(), -math.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    assert (lse[:, :, :41] == -math.inf).all() and not out[:, :, :41].any()


# --- FLOPs and bytes -------------------------------------------------------------------------------------------------


def counted(attention, q, k, v, gradient, **options):
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, **options)
        forward = counter.get_total_flops()
        torch.autograd.grad(out, (q, k, v), gradient)
    return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("mask", [longformer_mask(1024, 100, 5), bigbird_mask(1000, 60, 1, 2, 0, heads=4, block=64),
                                  documents_mask(torch.arange(900).expand(2, -1) // 200, causal=True)], ids=repr)
def test_flops_are_those_of_the_listed_blocks(mask):
    given = kit.inputs(2, 4, 2, mask.T, mask.S, 16)
    flops = block_sparse_attention_flops((2, 4, mask.T, 16), (2, 2, mask.S, 16), mask)
    assert counted(TILED, *given, mask=mask) == (flops.forward, flops.backward_recomputing)
    masked = counted(dense, *given, mask=mask.dense())  # a masked dense product computes all
    assert masked[0] > 1.3 * flops.forward and masked[0] == 2 * 32 * 8 * mask.T * mask.S


MASKS = [(longformer_mask(1500, 200, 3), 1500, 4, 2), (bigbird_mask(1000, 100, 2, 2, 0, heads=4), 1000, 4, 4),
         (causal_mask(800, block=64), 800, 4, 1), (documents_mask(torch.arange(600).expand(2, -1) // 170), 600, 4, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("mask", "T", "H", "G"), MASKS, ids=str)
def test_bytes_are_the_closed_form(mask, T, H, G, dtype):
    given = kit.inputs(2, H, G, T, T, 32, dtype, V=48)
    with memory.track(*given, mask.words) as tracked:
        before = tracked.now.total
        out = TILED(*given[:3], mask)
        kept = tracked.now.total - before
        torch.autograd.grad(out, given[:3], given[3])
    form = block_sparse_attention_bytes((2, H, T, 32), (2, G, T, 32), mask, dtype, v_dim=48, kernels=False)
    assert (kept, tracked.peak.total - before) == form
    assert form.peak < 2 * 2 * H * T * T * 4, "less than one matrix of scores and one of weights"


@pytest.mark.parametrize(("T", "dtype"), [(1, torch.float16), (33, torch.float64), (65, torch.float32)])
def test_bytes_of_tiles_that_are_smaller_than_a_pattern(T, dtype):
    given, mask = kit.inputs(3, 2, 1, T, T, 8, dtype, V=5), causal_mask(T, block=64)
    with memory.track(*given, mask.words) as tracked:
        before = tracked.now.total
        torch.autograd.grad(TILED(*given[:3], mask), given[:3], given[3])
    form = block_sparse_attention_bytes((3, 2, T, 8), (3, 1, T, 8), mask, dtype, v_dim=5, kernels=False)
    assert tracked.peak.total - before == form.peak


@pytest.mark.parametrize("kernel", ["tiled", "triton"])
def test_64k_tokens_with_a_window_of_1k_are_linear(kernel):
    def step(T, mask):
        q, k, v, gradient = (torch.empty(1, 4, T, 64, requires_grad=n < 3) for n in range(4))
        out = block_sparse_attention(q, k, v, mask, kernel=kernel)
        torch.autograd.grad(out, (q, k, v), gradient)

    peaks = []
    for T in (32768, 65536):
        mask, shape = longformer_mask(T, 1024, causal=True), (1, 4, T, 64)
        form = block_sparse_attention_bytes(shape, shape, mask, kernels=kernel == "triton").peak
        own = mask.nbytes if kernel == "triton" else mask.words.nbytes  # of which a dry run makes stand-ins
        peaks.append(memory.dry_run(step, T, mask).peak.total - 4 * 4 * T * 64 * 4)
        assert peaks[-1] == form + own
    assert 0 <= 2 * peaks[0] - peaks[1] < 2**24, "what does not grow: a tile"


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mask", "error", "words"), [
    (causal_mask(8), ValueError, "a mask of 8 queries and 8 keys with 7 and 9"),
    (BlockMask.of(lambda b, h, i, j: j <= i, 7, 9, batch=3), ValueError, "a mask of 3 in batch with 2: expected 1 or"),
    (BlockMask.of(lambda b, h, i, j: j <= i, 7, 9, heads=2), ValueError, "a mask of 2 in heads with 4: expected 1 or"),
    (torch.ones(9, 7, dtype=torch.bool), ValueError, r"an attn_mask of shape \(9, 7\) with 7 queries and 9 keys"),
    (torch.randn(7, 9), ValueError, "an attn_mask of torch.float32 with numbers besides 0 and −∞"),
    (torch.ones(7, 9, dtype=torch.int64), ValueError, "an attn_mask of torch.int64 with numbers besides"),
    ("causal", TypeError, "mask is a str: expected a BlockMask")])
def test_a_mask_that_does_not_fit_is_named(mask, error, words):
    with pytest.raises(error, match=words):
        block_sparse_attention(*kit.inputs()[:3], mask)


def test_a_kernel_that_does_not_run_is_named():
    given = kit.inputs(T=8, S=8, dtype=torch.float64)[:3]
    with pytest.raises(ValueError, match="kernel='triton' for torch.float64 on cpu"):
        block_sparse_attention(*given, causal_mask(8), kernel="triton")
    with pytest.raises(ValueError, match="kernel='fast': expected one of 'auto', 'triton', 'tiled'"):
        block_sparse_attention(*given, causal_mask(8), kernel="fast")


@pytest.mark.parametrize("kernel", ["tiled", "triton"])
def test_a_second_derivative_is_refused(kernel):
    q, k, v, gradient = kit.inputs(T=9, S=9)
    out = block_sparse_attention(q, k, v, causal_mask(9), kernel=kernel)
    [dq] = torch.autograd.grad(out, q, gradient, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable itself"):
        dq.sum().backward()


def test_patterns_of_a_mask_are_none_of_the_activations():
    mask, q = longformer_mask(1024, 256, 4, block=64), torch.empty(1, 1, 1024, 16)
    assert len(mask.words)
    with memory.track(q) as t:
        block_sparse_attention(q, q, q, mask, kernel="tiled")
    assert not t.peak["activations"]
