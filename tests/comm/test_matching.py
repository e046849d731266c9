"""Debug mode: ranks that do not match are named, where torch would hang, abort or return rubbish."""

import pytest
import torch
from rank_pool import failure, on_ranks, pooled

from refimpl.comm import CollectiveMismatch, launch


def different_sizes(comm):
    comm.all_reduce(torch.zeros(5 if comm.rank == 2 else 4))


def different_dtypes(comm):
    comm.all_gather(torch.zeros(4, dtype=torch.float64 if comm.rank == 2 else torch.float32))


def different_ops(comm):
    comm.reduce_scatter(torch.zeros(4), "max" if comm.rank == 2 else "sum")


def different_roots(comm):
    comm.broadcast(torch.zeros(4), 1 if comm.rank == 2 else 0)


def different_collectives(comm):
    if comm.rank == 2:
        comm.barrier()
    comm.all_reduce(torch.zeros(4))


def different_shapes_of_one_size(comm):
    comm.all_gather(torch.zeros(2, 2) if comm.rank == 2 else torch.zeros(4, 1))


MISMATCHES = {
    different_sizes: ("all_reduce of shape (4,), float32 on cpu, op sum", "all_reduce of shape (5,), float32"),
    different_dtypes: ("all_gather of shape (4,), float32", "all_gather of shape (4,), float64"),
    different_ops: ("reduce_scatter of shape (4,), float32 on cpu, op sum", "op max"),
    different_roots: ("from rank 0", "from rank 1"), different_shapes_of_one_size: ("(4, 1)", "(2, 2)"),
    different_collectives: ("ranks 0, 1 and 3: all_reduce", "rank 2: barrier")}


@pytest.mark.parametrize("fn", MISMATCHES, ids=lambda fn: fn.__name__)
def test_the_rank_that_differs_is_named_with_what_it_did(fn):
    error = failure("rank 2 differs in a collective", fn, 4, error=CollectiveMismatch, debug=True,
                    timeout=10)  # where nothing is compared, a barrier waits for an all_reduce for ever
    assert (error.rank, error.ranks) == (2, (2,))
    assert all(words in str(error) for words in (*MISMATCHES[fn], fn.__name__))  # this one in the traceback


@on_ranks(2, fails="rank 1 differs", error=CollectiveMismatch, launch=launch, debug=True)
def test_of_two_the_second_differs_from_the_first(comm):
    comm.all_reduce(torch.zeros(4 + comm.rank))


@on_ranks(6, fails="rank 5 differs", error=CollectiveMismatch, launch=launch, debug=True)
def test_ranks_are_those_of_the_world_in_a_sub_group_too(comm):
    odd = comm.split([1, 3, 5])
    if odd is not None:
        odd.all_reduce(torch.zeros(1 + (comm.rank == 5)))


@pytest.mark.parametrize("sent", [3, 5])
def test_a_send_that_does_not_fit_its_recv(sent):
    def fn(comm):
        if comm.rank == 0:
            comm.send(torch.zeros(sent), 1)
        elif comm.rank == 1:
            comm.recv(torch.zeros(4), 0)

    error = failure("ranks 0 and 1 do not match", fn, 3, error=CollectiveMismatch, debug=True)
    assert error.ranks == (0, 1) and f"rank 0: send of shape ({sent},), float32 on cpu" in str(error)
    assert "rank 1: recv of shape (4,), float32 on cpu" in str(error)


def test_receives_may_be_waited_for_in_any_order():
    def fn(comm):
        other = 1 - comm.rank
        receives = [comm.recv(torch.zeros(n), other, async_op=True) for n in (1, 2, 3)]
        sends = [comm.send(torch.full((n,), float(n)), other, async_op=True) for n in (1, 2, 3)]
        return [receives[i].wait().tolist() for i in (2, 0, 1)], [send.wait() for send in sends]

    expected = ([[3.0] * 3, [1.0], [2.0] * 2], [None] * 3)
    assert pooled(fn, 2, debug=True) == pooled(fn, 2) == [expected] * 2


def test_the_environment_can_ask_for_it(monkeypatch):
    monkeypatch.setenv("REFIMPL_COMM_DEBUG", "1")
    failure("", different_sizes, 4, error=CollectiveMismatch)


@on_ranks(3, fails="rank 1 differs", error=CollectiveMismatch, launch=launch, debug=True)
def test_a_description_too_long_for_its_header_is_still_compared(comm):
    comm.all_reduce(torch.zeros(*(1,) * 100, 1 + (comm.rank == 1)))


def test_the_mode_changes_nothing_of_what_matches():
    def fn(comm):
        return comm.all_reduce(torch.ones(3)).tolist(), comm.traffic

    assert pooled(fn, 3, debug=True) == pooled(fn, 3)


def test_without_it_a_rank_that_torch_aborts_is_told_of_the_mode():
    told = str(failure("debug=True", lambda comm: comm.all_gather(torch.zeros(4 + comm.rank)), 2,
                       error=CollectiveMismatch))
    assert "SIGABRT" in told and "  rank 1:\n    #1 all_gather of (5,) float32" in told
