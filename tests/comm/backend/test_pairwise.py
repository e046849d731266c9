"""reduce_scatter and all_gather as messages: the right numbers, in the right order, in no more memory than told."""

import functools
import operator

import pytest
import torch
from rank_pool import on_ranks

from refimpl import memory
from refimpl.comm.backend import torch_internals
from refimpl.comm.backend.pairwise import Messages
from refimpl.comm.backend.tensors import FLOATS, NAMED

OPS = {"sum": operator.add, "max": torch.maximum, "min": torch.minimum, "product": operator.mul}


def given_to(rank, shape, dtype):
    """Small integers, which each dtype adds up and multiplies exactly."""
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks("world_size")
def test_every_op_dtype_and_shape_at_once_later_and_in_place(comm, world_size):
    N, r = world_size, comm.rank
    for shape in ((12,), (12, 5), (24, 1, 3), (0,), (12, 0)):
        for dtype in (*NAMED, torch.bool):
            xs = [given_to(rank, shape, dtype) for rank in range(N)]
            gathered = [comm.all_gather(xs[r]), comm.all_gather(xs[r], async_op=True).wait()]
            into = torch.zeros(N * shape[0], *shape[1:], dtype=dtype)
            into[r * shape[0] : (r + 1) * shape[0]] = xs[r]
            gathered.append(comm.all_gather(into[r * shape[0] : (r + 1) * shape[0]], out=into))
            assert all(torch.equal(g, torch.cat(xs)) for g in gathered), ("all_gather", shape, dtype)
            ops = [op for op in (*OPS, "avg") if op != "avg" or dtype in FLOATS]
            for op in ops if dtype is not torch.bool else ("max", "min"):
                expected = functools.reduce(OPS.get(op, operator.add), xs).chunk(N)[r]
                expected = expected / N if op == "avg" else expected
                x = xs[r].clone()
                found = [comm.reduce_scatter(x, op), comm.reduce_scatter(x, op, async_op=True).wait()]
                assert torch.equal(x, xs[r]), ("changed", op, shape, dtype)
                found.append(comm.reduce_scatter(x, op, out=x.chunk(N)[r] if x.numel() else None))
                assert all(torch.equal(f, expected) for f in found), (op, shape, dtype)


@on_ranks(4)
def test_a_sum_does_not_depend_on_the_rank_where_it_is_added_up(comm):
    """Each chunk holds the same numbers, of which the order of adding up changes the sum's last bits."""
    xs = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)).exp() for rank in range(4)]
    expected = {"sum": functools.reduce(operator.add, xs), "product": functools.reduce(operator.mul, xs)}
    expected["avg"] = expected["sum"] / 4
    assert not torch.equal(expected["sum"], functools.reduce(operator.add, xs[::-1]))  # so it is a test
    for op, each in expected.items():
        assert torch.equal(comm.reduce_scatter(xs[comm.rank].repeat(4), op), each)


@on_ranks(2)
def test_several_under_way_at_once(comm):
    """Several at once, ended in another order than begun, on each rank in another one."""
    gathers = [comm.all_gather(torch.full((3,), 10.0 * i + comm.rank), async_op=True) for i in range(5)]
    sums = [comm.reduce_scatter(torch.full((comm.world_size,), float(i)), async_op=True) for i in range(5)]
    order = list(range(5))[:: 1 if comm.rank else -1]
    for i in order:
        assert sums[i].wait().tolist() == [i * comm.world_size] and sums[i].done()
        expected = [10.0 * i + rank for rank in range(comm.world_size) for _ in range(3)]
        assert gathers[i].wait().tolist() == expected
    left = comm.send_recv(torch.ones(1), 1 - comm.rank, torch.ones(1), 1 - comm.rank)
    assert left.item() == 1, "something is left over"


@on_ranks(4)
def test_in_a_sub_group(comm):
    group = comm.split([0, 2] if comm.rank % 2 == 0 else [1, 3])
    x = torch.arange(4.0) + 10 * comm.rank
    assert group.reduce_scatter(x).tolist() == [[20, 22], [40, 42], [24, 26], [44, 46]][comm.rank]
    assert group.all_gather(x[:1]).tolist() == [[0, 20], [10, 30]][comm.rank % 2]


@on_ranks(4)
def test_bytes_that_are_taken_on_the_way(comm):
    """What the allocator gives in collectives on N chunks, into tensors that are there."""
    chunk, small, found = 100_000, 1000, {}
    x, out = torch.ones(comm.world_size * chunk // 4), torch.ones(chunk // 4)
    works = {"reduce_scatter": lambda: comm.reduce_scatter(x, out=out),
             "reduce_scatter in place": lambda: comm.reduce_scatter(x, out=x.chunk(comm.world_size)[comm.rank]),
             "all_gather": lambda: comm.all_gather(out, out=x),
             "gloo's reduce_scatter": lambda: torch_internals.reduce_scatter_single(out, x)}
    for name, work in works.items():
        with memory.measure("cpu") as m:
            work()
        found[name] = m.peak
    assert found["all_gather"] <= small and found["reduce_scatter in place"] <= 3 * chunk + small
    assert found["reduce_scatter"] <= 3 * chunk + small
    assert found["gloo's reduce_scatter"] >= 4 * chunk  # a copy of the whole


@on_ranks(2)
def test_messages_larger_than_what_a_socket_holds(comm):
    """A megabyte to a rank that comes late."""
    if comm.rank == 1:
        torch.ones(10**6).cumsum(0)
    handle = comm.all_gather(torch.full((250_000,), float(comm.rank)), async_op=True)
    assert handle.wait().chunk(2)[1 - comm.rank].unique().tolist() == [1 - comm.rank]


class Work:
    def __init__(self, seen, name):
        self.seen, self.name = seen, name

    def wait(self):
        self.seen.append(self.name)


def test_sends_are_waited_for_too_and_what_is_left_to_do_is_done_once():
    """Else a caller writes to what is still being read."""
    seen = []
    messages = Messages([Work(seen, "send")], [Work(seen, "receive")], lambda: seen.append("add up"))
    messages.wait()
    messages.wait()
    assert sorted(seen[:2]) == ["receive", "send"] and seen[2:] == ["add up"]
