"""Ring attention in one screen beside dense attention: the same numbers, the bytes and traffic of the closed forms."""

import functools
import math
from unittest import mock

import pytest
import torch
from one_screen import check_paper

from refimpl import memory
from refimpl.comm import launch
from refimpl.model import softmax_attention
from refimpl.parallel import paper_ring

B, H, T, D, ITEM = 2, 3, 16, 4, 8  # T: tokens of all ranks; bytes of an element
CASES = pytest.mark.parametrize(("N", "zigzag"), [(N, zigzag) for N in (1, 2, 4) for zigzag in (False, True)])


def given():
    """Return q, k, v and the gradient of the output, of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(B, H, T, D, generator=generator, dtype=torch.float64) for _ in range(4)]


def own(x, comm, zigzag):
    """Return a rank's tokens."""
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


class Gathered(torch.autograd.Function):
    """Keys or values of all ranks, which stay here."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return torch.cat(comm.all_gather(x).chunk(comm.world_size), 2)

    @staticmethod
    def backward(ctx, dx):
        whole = ctx.comm.all_reduce(dx)
        return whole.chunk(ctx.comm.world_size, 2)[ctx.comm.rank], None


def everything_kept(q, k, v, comm, zigzag):
    """The mutant that gathers all keys and values, and keeps them for backward. In plain order alone."""
    assert not zigzag
    end = (comm.rank + 1) * q.shape[2]
    return softmax_attention(q, *(Gathered.apply(x, comm)[:, :, :end] for x in (k, v)), causal=True)


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
    torch.set_num_threads(1)
    attention = VERSIONS[version]
    q, k, v, d_out = (own(x, comm, zigzag) for x in given())
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
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
    before = sum(x.nbytes for x in inputs)
    assert out.shape == q.shape
    return {"far": far, "sent": sent, "kept": t.now.total - before}


@functools.cache
def found(N, version, zigzag):
    return launch(readings, N, version, zigzag)


def assert_numbers(N, version, zigzag):
    for rank in found(N, version, zigzag):
        assert max(rank["far"]) <= 1e-12


def assert_kept(N, version, zigzag):
    rows = B * H * T // N
    for rank in found(N, version, zigzag):
        assert rank["kept"] == (D + 1) * rows * ITEM  # O and L; q, k and v were there before


@CASES
def test_numbers_of_the_whole_sequence(N, zigzag):
    assert_numbers(N, "paper", zigzag)


@CASES
def test_kept_bytes_of_the_closed_form(N, zigzag):
    assert_kept(N, "paper", zigzag)


@CASES
def test_traffic_of_the_closed_form(N, zigzag):
    pair = 2 * B * H * T // N * D * ITEM  # k and v of a rank
    forward, backward = (N - 1) * pair, (N - 1) * pair + (N > 1) * N * pair
    for rank in found(N, "paper", zigzag):
        assert rank["sent"] == tuple({"send": n} if n else {} for n in (forward, backward))


@pytest.mark.parametrize("zigzag", [False, True])
def test_local_softmaxes_that_are_averaged_fail_here(zigzag):
    with pytest.raises(AssertionError):
        assert_numbers(2, "averaged", zigzag)


def test_keys_that_are_gathered_and_kept_have_the_same_numbers_and_fail_here():
    assert_numbers(4, "kept", False)
    with pytest.raises(AssertionError):
        assert_kept(4, "kept", False)


def work(N, zigzag):
    """Return [[pairs of queries and keys in each step] of each rank]."""
    t = T // N
    lengths = [[[len(range(t)[x]) for x in paper_ring.seen(r, (r - step) % N, t, zigzag)[:2]] for step in range(N)]
               for r in range(N)]
    return [[rows * keys for rows, keys in rank] for rank in lengths]


@pytest.mark.parametrize("N", [2, 4, 8])
def test_the_zig_zag_order_gives_all_ranks_the_same_work(N):
    t = T // N
    assert work(N, True) == [[t * t] + [t * t // 2] * (N - 1)] * N
    assert [sum(rank) for rank in work(N, False)] == [(r + 1) * t * t for r in range(N)]


def test_one_screen():
    check_paper("parallel", "paper_ring")
