"""Attention of a split sequence is that of the whole: ring, gathered and Ulysses, on 1, 2 and 4 ranks."""

import functools

import pytest
import torch
from context_kit import HEADS, WAYS, H, T, attend, expected, farthest, given, own
from rank_pool import on_ranks, pooled

from refimpl import memory
from refimpl.attention import reference_attention
from refimpl.comm import CollectiveMismatch, FakeCommunicator
from refimpl.context import AttentionPair, dense_pair, gathered_attention, ring, ring_attention
from refimpl.context.token_order import by_rank, in_order, positions, shard, spans
from refimpl.context.ulysses import repeats
from refimpl.model import softmax_attention
from refimpl.papers import ring_attention as paper_ring

WITHOUT_RING = pytest.mark.parametrize("way", ["ulysses", "gathered, plain", "gathered, zig-zag"])
ORDERS = pytest.mark.parametrize("order", ["plain", "zig-zag"])


@pytest.mark.parametrize(("way", "N", "heads", "causal"), [
    (way, N, heads, causal) for way in WAYS for N in (1, 2, 4) for heads in HEADS for causal in (True, False)])
def test_numbers_of_the_whole_sequence(way, N, heads, causal):
    for dtype, bound in {torch.float64: 1e-12, torch.float32: 1e-5}.items():
        assert farthest(N, way, HEADS[heads], causal, dtype) <= bound


@pytest.mark.parametrize("way", WAYS)
def test_in_16_bits_no_farther_than_twice_the_whole(way):
    alone = farthest(1, "gathered, plain", 2, True, torch.bfloat16)
    assert 1e-3 < farthest(4, way, 2, True, torch.bfloat16) <= 2 * alone


def rounded_once(comm, order, wide=True):
    """Return the share of a bf16 output that is the exact one, rounded. `wide`: False for the mutant that rounds the
    sum over blocks each time."""
    *qkv, _ = own(comm, order, given(2, torch.bfloat16))
    exact = reference_attention(*(x.double() for x in given(2, torch.bfloat16)[:3]), causal=True).bfloat16()
    if not wide:
        merge, ring._merge = ring._merge, lambda out, lse, *block: (merge(out, lse, *block), out.copy_(out.bfloat16()))
    try:
        found = ring_attention(*qkv, comm, causal=True, order=order)
    finally:
        ring._merge = merge if not wide else ring._merge
    return (found == own(comm, order, [exact])[0]).double().mean().item()


@ORDERS
def test_a_ring_sums_blocks_in_fp32(order):
    assert min(pooled(rounded_once, 4, order)) > 0.98
    assert min(pooled(rounded_once, 4, order, False)) < 0.9, "the mutant"


@ORDERS
@pytest.mark.parametrize("N", [2, 4])
@on_ranks("N")
def test_the_peak_of_forward_does_not_grow_with_the_ring(comm, N, order):
    """Keys and values that are here, and that arrive; the output and a block's, with logsumexp; a block's scores."""
    qkv = [torch.randn(1, 4, 64, 16) for _ in range(3)]
    with memory.track(*qkv) as t:
        ring_attention(*qkv, comm, causal=True, order=order)
    assert t.peak.total - t.start.total == 4 * (2 * 2 * 4 * 64 * 16 + 2 * (4 * 64 * 16 + 4 * 64) + 4 * 64 * 64)


def test_the_last_rank_s_peak_of_forward_is_that_of_one_block():
    """It sees all blocks, one by one; of none before is anything left."""
    qkv = [torch.randn(1, 4, 64, 16) for _ in range(3)]
    with memory.track(*qkv) as t:
        ring_attention(*qkv, FakeCommunicator(3, 4), causal=True)
    assert t.peak.total - t.start.total == 4 * (2 * 2 * 4 * 64 * 16 + 2 * (4 * 64 * 16 + 4 * 64) + 4 * 64 * 64)


@WITHOUT_RING
@pytest.mark.parametrize("inner", ["tiled", "flash"])
def test_any_attention_gathered_or_by_ulysses(way, inner):
    assert farthest(4, way, 2, True, inner=inner) <= 1e-12


@pytest.mark.parametrize("causal", [True, False])
@WITHOUT_RING
@on_ranks(2)
def test_the_attention_of_pytorch(comm, way, causal):
    """As dense attention: PyTorch's own mask is aligned top-left, and by another option."""
    *qkv, _ = own(comm, WAYS[way][1], given(2))
    out = attend(comm, way, *qkv, causal=causal, attention=torch.nn.functional.scaled_dot_product_attention)
    assert (out - attend(comm, way, *qkv, causal=causal)).abs().max() <= 1e-12


@pytest.mark.parametrize("window", [0, 3, 9])
@WITHOUT_RING
def test_windows(way, window):
    assert farthest(4, way, 2, True, window=window, inner="reference") <= 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ends", [(0, 16), (0, 3, 4, 11, 16), (0, 8, 16), (0, 1, 2, 16)])
@WITHOUT_RING
def test_packed_sequences(way, ends, causal):
    assert farthest(4, way, 2, causal, batch=1, cu_seqlens=list(ends), inner="reference") <= 1e-12


@pytest.mark.parametrize("causal", [True, False])
def test_a_rank_in_the_middle_of_packed_sequences(causal):
    """The second of two ranks: one of its sequences begins at the other, and not with the first key there."""
    q, k, v, _ = given(length=8, batch=1)
    whole = [torch.cat((x, x), 2) for x in (q, k, v)]  # as if the other rank had the same
    options = {"causal": causal, "cu_seqlens": [0, 3, 5, 11, 16]}
    expected = reference_attention(*whole, **options)[:, :, 8:]
    found = gathered_attention(q, k, v, FakeCommunicator(1, 2), attention=reference_attention, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize("N", [1, 2, 4])
@on_ranks("N")
def test_the_one_screen_is_held_equal(comm, N, zigzag):
    order, found = "zig-zag" if zigzag else "plain", []
    *inputs, d_out = own(comm, order, given())
    for version, options in ((paper_ring.ring_attention, {"zigzag": zigzag}),
                             (ring_attention, {"causal": True, "order": order})):
        leaves, start = [x.clone().requires_grad_() for x in inputs], comm.traffic
        out = version(*leaves, comm, **options)
        out.backward(d_out)
        found.append(([out.detach(), *(x.grad for x in leaves)], comm.traffic - start))
    (ours, sent), (theirs, sent_by_theirs) = found
    assert max((a - b).abs().max() for a, b in zip(ours, theirs, strict=True)) <= 1e-12 and sent == sent_by_theirs


def under_autocast(comm, order):
    """Return the distances of a ring's fp32 output and gradients from the whole; those of gathered keys from an
    attention without ranks, for one rank; both under autocast to bf16."""
    *inputs, d_out = own(comm, order, given(2, torch.float32))
    found = []
    for function in (ring_attention, gathered_attention, lambda *qkv, **how: softmax_attention(*qkv[:3], causal=True)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*leaves, comm, causal=True, order=order)
        out.backward(d_out.to(out.dtype))
        found.append([out.detach(), *(x.grad for x in leaves)])
    far = max((x.double() - y).abs().max().item() for x, y in zip(found[0], own(comm, order, expected(2)), strict=True))
    return far, max((x - y).abs().max().item() for x, y in zip(found[1], found[2], strict=True))


@ORDERS
def test_under_autocast_a_ring_stays_in_fp32_and_gathered_keys_are_computed_twice_alike(order):
    assert max(far for far, _ in pooled(under_autocast, 2, order)) <= 1e-5
    assert pooled(under_autocast, 1, "plain")[0][1] == 0


def averaged(*given, **how):
    """The mutant that averages local softmaxes: each block weighs as much."""
    out, lse = dense_pair.forward(*given, **how)
    return out, torch.zeros_like(lse)


def own_logsumexp(d_out, q, k, v, out, lse, **how):
    """The mutant whose backward computes a block's logsumexp again, as autograd of the block alone would."""
    return dense_pair.backward(d_out, q, k, v, *dense_pair.forward(q, k, v, **how), **how)


FORGETFUL = {"averaged": AttentionPair(averaged, dense_pair.backward),
             "own_logsumexp": AttentionPair(dense_pair.forward, own_logsumexp)}


@pytest.mark.parametrize("mutant", FORGETFUL)
@pytest.mark.parametrize("causal", [True, False])
def test_versions_that_forget_the_other_blocks_are_seen(mutant, causal):
    way = functools.partial(ring_attention, attention=FORGETFUL[mutant]), "plain"
    assert farthest(1, way, H, causal) <= 1e-12 or mutant == "averaged"
    assert farthest(2, way, H, causal) > 1e-2


# --- orders ----------------------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("N", [1, 2, 3, 4])
def test_orders_are_permutations_that_go_back(N, order):
    whole = torch.arange(24)[None]
    parts = [shard(whole, r, N, order) for r in range(N)]
    assert all(torch.equal(part[0], positions(r, N, 24 // N, order)) for r, part in enumerate(parts))
    joined = torch.cat(parts, 1)
    assert torch.equal(in_order(joined, N, order, 1), whole) and torch.equal(by_rank(whole, N, order, 1), joined)


def test_zig_zag_is_balanced():
    """The keys that all queries of a rank see, if causal."""
    def work(order):
        return [sum(positions(r, 4, 8, order).add(1).tolist()) for r in range(4)]

    assert len({*work("zig-zag")}) == 1 and work("plain")[3] > 5 * work("plain")[0]
    assert spans(1, 4, 8, "zig-zag") == [(4, 8), (24, 28)]


@pytest.mark.parametrize(("H", "G", "N", "times"), [(8, 8, 4, 1), (8, 2, 4, 2), (8, 1, 8, 8), (12, 3, 2, 2),
                                                      (12, 3, 4, 4), (12, 6, 4, 2), (8, 4, 1, 1)])
def test_key_heads_are_repeated_as_needed(H, G, N, times):
    assert repeats(H, G, N) == times


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "options", "words"), [
    ("ring, zig-zag", {"window": 4}, "window=4 in ring attention with causal=True and order='zig-zag': expected"),
    ("ring, plain", {"window": -1}, "window=-1: expected an int of at least 0"),
    ("ring, plain", {"cu_seqlens": [0, 4]}, "packed sequences, in ring attention"),
    ("gathered, plain", {"window": 4, "causal": False}, "window=4 without causal=True"),
    ("gathered, plain", {"window": 4}, "window=4, but .*softmax_attention.* has no such option"),
    *((way, {"dropout_p": 0.1}, "dropout_p=0.1: attention of a split sequence drops no weights") for way in WAYS),
    ("ulysses", {}, "4 query heads on 8 ranks: expected a multiple of 8")])
def test_what_cannot_be_is_refused_with_the_reason(way, options, words):
    q, k, v, _ = given()
    with pytest.raises(ValueError, match=words):
        attend(FakeCommunicator(0, 8), way, q, k, v, **{"causal": True, **options})


@pytest.mark.parametrize("way", ["ring, zig-zag", "gathered, zig-zag"])
def test_an_odd_number_of_tokens_in_zig_zag_order(way):
    q, k, v, _ = (x[:, :, :3] for x in given())
    with pytest.raises(ValueError, match="3 tokens on a rank in zig-zag order: expected an even number"):
        attend(FakeCommunicator(0, 2), way, q, k, v, causal=True)


def test_an_unknown_order_and_a_sequence_that_cannot_be_cut():
    with pytest.raises(ValueError, match="order='striped': expected one of 'plain', 'zig-zag'"):
        attend(FakeCommunicator(0, 2), (ring_attention, "striped"), *given()[:3])
    x = torch.arange(10)[None]
    with pytest.raises(ValueError, match=r"10 tokens on 4 ranks in plain order: .* multiple of 4; .* up to 12"):
        shard(x, 0, 4, "plain")
    with pytest.raises(ValueError, match=r"10 tokens on 4 ranks in zig-zag order: .* multiple of 8; .* up to 16"):
        shard(x, 0, 4, "zig-zag")
    assert shard(x, 0, 4, "zig-zag", pad=-100).tolist() == [[0, 1, -100, -100]]


@on_ranks(2, fails=r"(?s)(?=.*\(2, 2, 4, 16, 8\)).*\(2, 2, 4, 14, 8\)", error=CollectiveMismatch, debug=True)
def test_ranks_with_other_lengths_are_named_in_debug_mode(comm):
    ring_attention(*(x[:, :, :T - 2 * comm.rank] for x in given()[:3]), comm)
