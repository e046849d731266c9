"""Collectives by host: the numbers of those that are pairwise, wherever ranks are. tests/hosts counts their bytes."""

import functools
import itertools
import weakref
from types import SimpleNamespace

import pytest
import torch
from rank_pool import on_ranks

from refimpl.comm import Communicator
from refimpl.comm.backend.by_host import ByHost, Relayed, cable_bytes
from refimpl.comm.hosts.facts import Hosts


def on_hosts(comm, names):
    """The same ranks, as if on these hosts."""
    return Communicator(comm.rank, comm.world_size, group=comm._group,
                        hosts=Hosts([{"host": name, "address": name} for name in names]))


@on_ranks(4)
def test_numbers_are_those_of_one_host(comm):
    def compare(there, later, call):
        found = [call(each, async_op=later) for each in (comm, there)]
        assert torch.equal(*(each.wait() if later else each for each in found))

    for names in ("aabb", "abbb", "abab", "abbc", "aabc"):
        there = on_hosts(comm, names)
        assert isinstance(there._gather.__self__, ByHost)
        torch.manual_seed(comm.rank)
        for later, dtype in itertools.product((False, True), (torch.float64, torch.int64, torch.bfloat16, torch.bool)):
            x = torch.randint(0, 9, (8, 3)).to(dtype)
            for given in (x, x[:0]):
                compare(there, later, functools.partial(Communicator.all_gather, x=given))
            for op in ("sum", "max", "min", "product", *(["avg"] if dtype is torch.float64 else [])):
                compare(there, later, functools.partial(Communicator.reduce_scatter, x=x, op=op))
        whole = torch.arange(8.0) * (comm.rank + 1)
        part = whole[2 * comm.rank:2 * comm.rank + 2]
        expected = part / (comm.rank + 1) * 10
        assert torch.equal(there.reduce_scatter(whole, out=part), expected)
        assert torch.equal(there.all_gather(part, out=whole), torch.arange(8.0) * 10)


@on_ranks(4)
def test_a_relay_goes_on_while_its_rank_waits_for_another(comm):
    """Rank 1 takes chunks of the other host for rank 0, which sends what rank 1 waits for only when it has them."""
    there = on_hosts(comm, "aabb")
    handles = [there.all_gather(torch.full((2,), comm.rank + i), async_op=True) for i in range(3)]
    if comm.rank == 0:
        assert handles[0].wait().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        comm.send(torch.ones(1), 1)
    if comm.rank == 1:
        comm.recv(torch.ones(1), 0)
    for i in (2, 0, 1):
        assert handles[i].wait().tolist() == [each + i for each in (0, 0, 1, 1, 2, 2, 3, 3)]


def test_what_has_ended_is_not_kept_until_the_next_begins():
    by_host, kept = ByHost([[0, 1], [2]]), []

    def begun():
        given = [Relayed((), list, ())]
        there = weakref.ref(given[0])
        yield given.pop()
        kept.append(there())

    by_host._relays = SimpleNamespace(get=begun().__next__)
    with pytest.raises(StopIteration):
        by_host._relay()
    assert kept == [None]


def test_bytes_of_the_closed_form():
    assert cable_bytes("all_gather", 800, 4, 8, 2) == cable_bytes("reduce_scatter", 800, 4, 8, 2) == 400
    assert [cable_bytes("all_gather", 400, S, 4, 3) for S in (1, 2, 1)] == [200, 400, 200]


@on_ranks(4)
def test_one_rank_a_host_and_one_host_send_pairwise(comm):
    for names in ("aaaa", "abcd"):
        assert not hasattr(on_hosts(comm, names)._gather, "__self__")
