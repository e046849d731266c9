"""Transfers over a link take what the closed form says, on real ranks; what is computed meanwhile is not waited for."""

import functools
import time

import pytest
import torch
from patience import Late, about, against_the_clock, check, check_all, patiently, within
from rank_pool import at_once, failure, on_ranks, pooled

from refimpl import memory
from refimpl.comm import FakeCommunicator, Link, compute, launch, ring_all_reduce, ring_traffic
from refimpl.comm.backend.wire import Wire
from refimpl.comm.link import steps

RATE = 10e6  # bytes/s
X = torch.ones(600_000)  # 2.4 MB; on two ranks an all_reduce sends as many bytes
COLLECTIVES = {
    "all_reduce": lambda comm, x, **how: comm.all_reduce(x, **how),
    "reduce_scatter": lambda comm, x, **how: comm.reduce_scatter(x, **how),
    "all_gather": lambda comm, x, **how: comm.all_gather(x.chunk(comm.world_size)[0], **how),
    "all_to_all": lambda comm, x, **how: comm.all_to_all(x, **how),
    "broadcast": lambda comm, x, **how: comm.broadcast(x, 0, **how)}


def seconds_of(comm, function, tries=3):
    """[seconds from the moment that the first rank begins until this rank is through], of each try."""
    found = []
    for _ in range(tries):
        comm.barrier()
        begin = torch.tensor(time.monotonic(), dtype=torch.float64)
        function()
        end = time.monotonic()
        found.append(end - comm.host().all_reduce(begin, "min").item())
    return found


def test_the_closed_form():
    link = Link(bytes_per_second=1e6, latency=0.5)
    found = {name: link.seconds(name, ring_traffic(name, 4_000_000, 4), 4) for name in (*COLLECTIVES, "send")}
    assert found == {"all_reduce": 6 * 0.5 + 6, "reduce_scatter": 3 * 0.5 + 3, "all_gather": 3 * 0.5 + 3,
                     "all_to_all": 3 * 0.5 + 3, "broadcast": 3 * 0.5 + 4, "send": 0.5 + 4}
    assert all(steps(name, 1) == 0 == link.seconds(name, 0, 1) for name in found)
    assert Link(float("inf"), 0.5).seconds("send", 10**12, 2) == 0.5


@pytest.mark.parametrize(("arguments", "words"), [
    ((0,), "bytes_per_second=0: expected a number above 0"), ((True,), "bytes_per_second=True"),
    (("fast",), "bytes_per_second='fast'"), ((float("nan"),), "bytes_per_second=nan"),
    ((1, -1), "latency=-1: expected a number of seconds, 0 or more"), ((1, float("inf")), "latency=inf")])
def test_a_link_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        Link(*arguments)
    with pytest.raises(ValueError, match="no steps are known for 'gather'"):
        steps("gather", 2)


@pytest.mark.parametrize("name", COLLECTIVES)
@against_the_clock
@on_ranks(2, then=check_all)
def test_a_collective_takes_its_bytes_over_the_rate(comm, name):
    comm.link, x = Link(RATE), torch.ones(600_000 if name in ("all_reduce", "broadcast") else 1_200_000)
    return [(seconds_of(comm, lambda: COLLECTIVES[name](comm, x), tries=2), 0.24)]


@against_the_clock
@on_ranks(3, then=check_all)
def test_it_takes_its_steps_times_the_latency(comm):
    comm.link = Link(float("inf"), 0.06)
    return [(seconds_of(comm, lambda: comm.all_reduce(torch.ones(3)), tries=2), 4 * 0.06)]


def beside_computation(comm, at_begin):
    """An all_gather of 0.24 s, beside computation of 0.1 and of 0.4 s. The mutant sleeps when it begins."""
    def step(seconds):
        handle = comm.all_gather(X, async_op=True)
        compute(seconds)
        handle.wait()

    comm.link = Link(RATE)
    if at_begin:
        comm._wire.collective = at_once(comm._wire.collective)
    return seconds_of(comm, lambda: step(0.1)), seconds_of(comm, lambda: step(0.4))


@against_the_clock
def test_what_is_computed_meanwhile_is_not_waited_for():
    for short, long in pooled(beside_computation, 2, False):
        check(short, max(0.24, 0.1))
        check(long, max(0.24, 0.4))


@against_the_clock
def test_a_link_that_sleeps_at_the_beginning_hides_nothing():
    for short, long in pooled(beside_computation, 2, True):
        for readings, seconds in ((short, 0.1), (long, 0.4)):
            assert min(readings) >= 0.997 * (0.24 + seconds), "the bytes' own way comes on top: it is not hidden either"
            with pytest.raises(Late):
                check(readings, max(0.24, seconds))


@against_the_clock
@on_ranks(2, then=check_all)
def test_collectives_queue_in_a_communicator_and_not_beside_it(comm):
    """Seconds until the second of two all_reduces has ended, which is waited for first: of one communicator, of two."""
    comm.link = Link(RATE)
    row, first = comm.split(range(comm.world_size)), []

    def second_of_two(group):
        while first:
            first.pop().wait()
        first.append(comm.all_reduce(X, async_op=True))
        group.all_reduce(X, async_op=True).wait()

    return [(seconds_of(comm, lambda: second_of_two(comm)), 0.48), (seconds_of(comm, lambda: second_of_two(row)), 0.24)]


@against_the_clock
def test_a_collective_begins_with_its_last_rank_and_ends_at_once_on_all():
    def one_comes_late(comm):
        comm.link, ends = Link(RATE), []

        def step():
            compute(0.1 * comm.rank)
            comm.all_reduce(X)
            ends.append(time.monotonic())

        return seconds_of(comm, step), ends

    (first, first_ends), (second, second_ends) = pooled(one_comes_late, 2)
    check(first, 0.34)
    check(second, 0.34)
    about([a - b for a, b in zip(first_ends, second_ends, strict=True)], 0, 0.01)


@against_the_clock
@on_ranks(2, then=check_all)
def test_a_message_travels_while_its_sender_and_its_receiver_compute(comm):
    """Rank 0 sends two messages of 0.12 s each, rank 1 is there at once, or 0.2 s later."""
    comm.link = Link(RATE)
    x, other = X[:300_000], 1 - comm.rank

    def step(late):
        if comm.rank:
            compute(late)
            return [comm.recv(x, 0) for _ in range(2)]
        handles = [comm.send(x, 1, async_op=True) for _ in range(2)]
        compute(0.2)
        return [handle.wait() for handle in handles]

    return [(seconds_of(comm, lambda: step(0)), 2 * 0.12), (seconds_of(comm, lambda: step(0.2)), 2 * 0.12),
            (seconds_of(comm, lambda: comm.send_recv(X, other, X, other)), 0.24)]


@against_the_clock
@on_ranks(3, then=check_all)
def test_a_ring_of_messages_takes_as_long_as_the_collective(comm):
    comm.link = Link(RATE, 0.03)
    expected = comm.link.seconds("all_reduce", ring_traffic("all_reduce", X.nbytes, 3), 3)
    return [(seconds_of(comm, lambda: ring_all_reduce(comm, X)), expected),
            (seconds_of(comm, lambda: comm.all_reduce(X)), expected)]


@against_the_clock
@on_ranks(4, then=check_all)
def test_a_sub_group_inherits_the_link_until_it_is_given_another(comm):
    comm.link = Link(RATE)
    row = comm.split([0, 1] if comm.rank < 2 else [2, 3])
    column = comm.split([0, 2] if comm.rank in (0, 2) else [1, 3])
    assert row.link == Link(RATE)
    column.link = Link(2 * RATE)
    slow, quick = (seconds_of(comm, lambda group=group: group.all_reduce(X)) for group in (row, column))
    row.link = None
    assert min(seconds_of(comm, lambda: row.all_reduce(X))) < 0.1 and comm.link == Link(RATE)
    return [(slow, 0.24), (quick, 0.12)]


@patiently
@on_ranks(2, then=functools.partial(within, most=0.4))
def test_what_the_link_does_not_charge_for(comm):
    comm.link = Link(RATE, 0.5)

    def step():
        comm.barrier()
        comm.host().all_gather(torch.zeros(1))
        comm.split([0]), comm.split([1])

    comm.host()
    return min(seconds_of(comm, step, tries=2))


def everything(comm, link):
    """All collectives, and messages: what they return, what was sent, and every byte that a tracker saw."""
    comm.link = link
    x = torch.arange(12.0) + comm.rank
    following, preceding = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    with memory.track() as t:
        results = [call(comm, x) for call in COLLECTIVES.values()]
        results += [call(comm, x, async_op=True).wait() for call in COLLECTIVES.values()]
        results.append(comm.send_recv(x, following, x, preceding))
    return torch.cat(results), comm.traffic, comm.order.ended, t.peak


@pytest.mark.parametrize("debug", [False, True])
def test_a_link_changes_no_result_no_traffic_and_no_byte(debug):
    without, over_it = (pooled(everything, 3, link, debug=debug) for link in (None, Link(1e6, 1e-3)))
    for (result, *quick, bytes_without), (slow_result, *slow, bytes_over_it) in zip(without, over_it, strict=True):
        assert torch.equal(result, slow_result) and quick == slow
        assert debug or bytes_without == bytes_over_it  # debug mode's own headers are seen at times


@on_ranks(2, fails=r"(?s)began other collectives.*link of Link\(bytes_per_second=10000000.0, latency=0.0\)",
          launch=launch, timeout=2)
def test_ranks_with_unlike_links_are_named(comm):
    if comm.rank:
        comm.link = Link(RATE)
    for _ in range(2):
        comm.all_reduce(X)


def test_who_sleeps_for_the_link_or_computes_does_not_hang():
    def slowly(comm):
        comm.link = Link(1e3)
        comm.all_reduce(torch.ones(500))
        compute(2)

    def hang(comm):
        comm.link = Link(RATE)
        comm.all_reduce(X)
        if comm.rank == 0:
            comm.recv(X, 1)
        comm.host().barrier()

    launch(slowly, 2, timeout=1)
    failure("wait for each other|did not go on", hang, 2, timeout=1)


def test_a_fake_communicator_keeps_the_link_and_takes_no_time():
    comm = FakeCommunicator(0, 4)
    comm.link = Link(1e-6, 1e6)
    begin = time.monotonic()
    for call in COLLECTIVES.values():
        call(comm, torch.ones(8))
    comm.send(torch.ones(8), 1)
    assert comm.split([0, 1]).link == comm.link and time.monotonic() - begin < 60
    with pytest.raises(TypeError, match="link=1000000.0: expected a Link"):
        comm.link = 1e6


def test_ranks_on_several_machines_share_no_clock(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="ranks of one machine"):
        Wire(Link(1), None, 4)
