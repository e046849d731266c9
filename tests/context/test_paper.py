"""Ring attention in one screen beside dense attention: the same numbers, the bytes and traffic of the closed forms."""

import functools
import math
from unittest import mock

import pytest
import torch
from one_screen import check_paper
from rank_pool import pooled
from users_kit import function_of

from refimpl import memory
from refimpl.model import softmax_attention
from refimpl.papers import ring_attention as paper_ring

B, H, T, D, ITEM = 2, 3, 16, 4, 8  # T: tokens of all ranks; bytes of an element
CASES = pytest.mark.parametrize(("N", "zigzag"), [(N, zigzag) for N in (1, 2, 4) for zigzag in (False, True)])


def given():
    """Return q, k, v and the gradient of the output, of the whole sequence."""
    return torch.randn(4, B, H, T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def own(x, comm, zigzag):
    if not zigzag:
        return x.chunk(comm.world_size, 2)[comm.rank]
    chunks = x.chunk(2 * comm.world_size, 2)
    return torch.cat((chunks[comm.rank], chunks[-1 - comm.rank]), 2)


@functools.cache
def expected():
    q, k, v, d_out = given()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = softmax_attention(*inputs, causal=True)
    out.backward(d_out)
    return [out.detach(), *(x.grad for x in inputs)]


def gathered(x, comm):
    """Keys or values of all ranks, which stay here."""
    return function_of(lambda ctx, x: torch.cat(comm.all_gather(x).chunk(comm.world_size), 2),
                       lambda ctx, dx: comm.all_reduce(dx).chunk(comm.world_size, 2)[comm.rank]).apply(x)


def everything_kept(q, k, v, comm, zigzag):
    """The mutant that gathers all keys and values, and keeps them for backward. In plain order alone."""
    assert not zigzag
    end = (comm.rank + 1) * q.shape[2]
    return softmax_attention(q, *(gathered(x, comm)[:, :, :end] for x in (k, v)), causal=True)


def local_softmaxes_averaged(q, k, v, comm, zigzag):
    """The mutant that weighs all blocks alike."""
    def average(a, b):
        seen = 1 if (a == -math.inf).all() else 2
        return torch.full_like(a, 0) + math.log(seen)

    with mock.patch.object(torch.Tensor, "logaddexp", average):
        return paper_ring.ring_attention(q, k, v, comm, zigzag)


VERSIONS = {"paper": paper_ring.ring_attention, "kept": everything_kept, "averaged": local_softmaxes_averaged}


def readings(comm, version, zigzag):
    """One forward and backward: distances from the whole, what was sent, what is kept between the two."""
    attention = VERSIONS[version]
    *qkv, d_out = (own(x, comm, zigzag) for x in given())
    inputs = [x.clone().requires_grad_() for x in qkv]
    start = comm.traffic
    out = attention(*inputs, comm, zigzag)
    middle = comm.traffic
    out.backward(d_out)
    sent = dict(middle - start), dict(comm.traffic - middle)
    far = [(x - own(y, comm, zigzag)).abs().max().item()
           for x, y in zip([out, *(x.grad for x in inputs)], expected(), strict=True)]
    del out
    with memory.track(*inputs) as t:
        out = attention(*inputs, comm, zigzag)
    assert out.shape == inputs[0].shape
    return {"far": max(far), "sent": sent, "kept": t.now.total - t.start.total}


@functools.cache
def found(N, version, zigzag):
    return pooled(readings, N, version, zigzag)


@CASES
def test_numbers_of_the_whole_sequence(N, zigzag, version="paper"):
    assert all(rank["far"] <= 1e-12 for rank in found(N, version, zigzag))


@CASES
def test_kept_bytes_of_the_closed_form(N, zigzag, version="paper"):
    for rank in found(N, version, zigzag):
        assert rank["kept"] == (D + 1) * B * H * T // N * ITEM  # O and L; q, k and v were there before


@CASES
def test_traffic_of_the_closed_form(N, zigzag):
    pair = 2 * B * H * T // N * D * ITEM  # k and v of a rank
    forward, backward = (N - 1) * pair, (N - 1) * pair + (N > 1) * N * pair
    for rank in found(N, "paper", zigzag):
        assert rank["sent"] == tuple({"send": n} if n else {} for n in (forward, backward))


@pytest.mark.parametrize("zigzag", [False, True])
def test_local_softmaxes_that_are_averaged_fail_here(zigzag):
    with pytest.raises(AssertionError):
        test_numbers_of_the_whole_sequence(2, zigzag, "averaged")


def test_keys_that_are_gathered_and_kept_have_the_same_numbers_and_fail_here():
    test_numbers_of_the_whole_sequence(4, False, "kept")
    with pytest.raises(AssertionError):
        test_kept_bytes_of_the_closed_form(4, False, "kept")


def work(N, zigzag):
    """Return [[pairs of queries and keys in each step] of each rank]."""
    t = T // N
    return [[math.prod(len(range(t)[x]) for x in paper_ring.seen(r, (r - step) % N, t, zigzag)[:2])
             for step in range(N)] for r in range(N)]


@pytest.mark.parametrize("N", [2, 4, 8])
def test_the_zig_zag_order_gives_all_ranks_the_same_work(N):
    t = T // N
    assert work(N, True) == [[t * t] + [t * t // 2] * (N - 1)] * N
    assert [sum(rank) for rank in work(N, False)] == [(r + 1) * t * t for r in range(N)]


def test_one_screen():
    check_paper("context", "ring_attention")
