"""A window over a ring: the attention of the whole sequence, while only neighbours send, and a window of keys alone."""

import functools

import pytest
import torch
from context_kit import D, attend, expected, farthest, given, own
from rank_pool import pooled

from refimpl import memory
from refimpl.attention import flash_pair, tiled_pair
from refimpl.comm import CollectiveMismatch, FakeCommunicator, simulate
from refimpl.context import ring_attention
from refimpl.context.closed_forms import attention_traffic
from refimpl.context.neighbours import hops


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9, 12, 40])
@pytest.mark.parametrize(("N", "G"), [(4, 4), (2, 2), (1, 1)])
def test_output_and_gradients_are_those_of_the_whole_sequence(N, G, window):
    assert farthest(N, "ring, plain", G, window=window) <= 1e-12


@pytest.mark.parametrize("window", [2, 6, 11])
def test_on_three_ranks(window):
    assert farthest(3, "ring, plain", 2, window=window, length=18) <= 1e-12


def test_a_token_that_sees_itself_alone_has_its_own_value():
    q, k, v, _ = given()
    assert torch.equal(ring_attention(q, k, v, FakeCommunicator(1, 2), causal=True, window=0), v)


def by_pair(comm, name, window):
    """Distances of a rank's output and gradients, in fp32."""
    *inputs, d_out = own(comm, "plain", given(2, torch.float32))
    inputs = [x.requires_grad_() for x in inputs]
    pair = {"tiled": tiled_pair, "flash": flash_pair}[name]
    out = ring_attention(*inputs, comm, causal=True, window=window, attention=pair)
    out.backward(d_out)
    whole = own(comm, "plain", expected(2, window=window))
    return [(x.double() - y).abs().max().item() for x, y in zip([out.detach(), *(x.grad for x in inputs)], whole,
                                                                strict=True)]


@pytest.mark.parametrize("name", ["tiled", "flash"])
def test_by_pairs_without_a_matrix(name):
    assert max(map(max, pooled(functools.partial(by_pair, name=name, window=5), 4))) <= 2e-6


def sent(comm, window):
    """Bytes of forward and backward, and the peak of forward above q, k and v."""
    *inputs, d_out = own(comm, "plain", given(2, torch.float32, 64))
    inputs = [x.requires_grad_() for x in inputs]
    before = comm.traffic
    with memory.track(*inputs, d_out) as tracked:
        out = ring_attention(*inputs, comm, causal=True, window=window, attention=tiled_pair)
        middle = comm.traffic
        out.backward(d_out)
    return dict(middle - before), dict(comm.traffic - middle), tracked.peak.total


@pytest.mark.parametrize("window", [3, 16, 40, 64])
def test_bytes_on_the_wire_are_those_of_the_window(window):
    forward, backward = attention_traffic("ring", 2, 16, 4, 2, D, 4, window=window)
    for ours in pooled(functools.partial(sent, window=window), 4):
        assert ours[:2] == (dict(forward), dict(backward))
    ring, _ = attention_traffic("ring", 2, 16, 4, 2, D, 4)  # the mutant: keys that nobody sees go around
    assert forward["send"] == ring["send"] * min(window, 48) // 48


def test_who_gives_how_many():
    assert hops(16, 40, 4) == [16, 16, 8] and hops(16, 99, 3) == [16, 16]
    assert hops(16, 3, 4) == [3] and hops(16, 0, 4) == []


@pytest.mark.parametrize(("way", "options"), [("ring, zig-zag", {"causal": True}), ("ring, plain", {"causal": False})])
def test_a_window_of_other_than_neighbours_is_refused(way, options):
    q, k, v, _ = given()
    with pytest.raises(ValueError, match=f"window=4 in ring attention with causal={options['causal']} and order="):
        attend(FakeCommunicator(0, 2), way, q, k, v, window=4, **options)


def test_ranks_with_other_windows_are_named():
    def attend_with(comm):
        *qkv, _ = own(comm, "plain", given())
        return ring_attention(*qkv, comm, causal=True, window=3 + comm.rank)

    with pytest.raises(Exception) as raised:
        simulate(attend_with, 2)
    assert isinstance(raised.value.__cause__, CollectiveMismatch) or isinstance(raised.value, CollectiveMismatch)
