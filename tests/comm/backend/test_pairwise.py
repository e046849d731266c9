"""reduce_scatter and all_gather as messages: the right numbers, in the right order, in no more memory than told."""

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from rank_pool import pooled

from refimpl import memory
from refimpl.comm.backend.pairwise import Messages
from refimpl.comm.backend.tensors import FLOATS, NAMED

OPS = {"sum": operator.add, "max": torch.maximum, "min": torch.minimum, "product": operator.mul}
SHAPES = ((12,), (12, 5), (24, 1, 3), (0,), (12, 0))


def given_to(rank, shape, dtype):
    """Small integers, which each dtype adds up and multiplies exactly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


def every_op(comm):
    """What is wrong, of all ops, dtypes and shapes, at once, later, and in place."""
    wrong, N, r = [], comm.world_size, comm.rank
    for shape in SHAPES:
        for dtype in (*NAMED, torch.bool):
            xs = [given_to(rank, shape, dtype) for rank in range(N)]
            gathered = [comm.all_gather(xs[r]), comm.all_gather(xs[r], async_op=True).wait()]
            into = torch.zeros(N * shape[0], *shape[1:], dtype=dtype)
            into[r * shape[0] : (r + 1) * shape[0]] = xs[r]
            gathered.append(comm.all_gather(into[r * shape[0] : (r + 1) * shape[0]], out=into))
            wrong += [("all_gather", shape, dtype)] * (not all(torch.equal(g, torch.cat(xs)) for g in gathered))
            ops = [op for op in (*OPS, "avg") if op != "avg" or dtype in FLOATS]
            for op in ops if dtype is not torch.bool else ("max", "min"):
                expected = functools.reduce(OPS.get(op, operator.add), xs).chunk(N)[r]
                expected = expected / N if op == "avg" else expected
                x = xs[r].clone()
                found = [comm.reduce_scatter(x, op), comm.reduce_scatter(x, op, async_op=True).wait()]
                wrong += [("changed", op, shape, dtype)] * (not torch.equal(x, xs[r]))
                found.append(comm.reduce_scatter(x, op, out=x.chunk(N)[r] if x.numel() else None))
                wrong += [(op, shape, dtype)] * (not all(torch.equal(f, expected) for f in found))
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_op_dtype_and_shape_at_once_later_and_in_place(world_size):
    assert pooled(every_op, world_size) == [[]] * world_size


def rounded(comm):
    """Each chunk holds the same numbers, of which the order of adding up changes the sum's last bits."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank)).exp().repeat(comm.world_size)
    return {op: comm.reduce_scatter(x, op) for op in ("sum", "avg", "product")}


def test_a_sum_does_not_depend_on_the_rank_where_it_is_added_up():
    answers = pooled(rounded, 4)
    xs = [torch.randn(1000, generator=torch.Generator().manual_seed(rank)).exp() for rank in range(4)]
    expected = {"sum": functools.reduce(operator.add, xs), "product": functools.reduce(operator.mul, xs)}
    expected["avg"] = expected["sum"] / 4
    assert not torch.equal(expected["sum"], functools.reduce(operator.add, xs[::-1]))  # so it is a test
    for answer in answers:
        assert all(torch.equal(answer[op], expected[op]) for op in expected)


def under_way(comm):
    """Several at once, ended in another order than begun, on each rank in another one."""
    gathers = [comm.all_gather(torch.full((3,), 10.0 * i + comm.rank), async_op=True) for i in range(5)]
    sums = [comm.reduce_scatter(torch.full((comm.world_size,), float(i)), async_op=True) for i in range(5)]
    order = list(range(5))[:: 1 if comm.rank else -1]
    for i in order:
        assert sums[i].wait().tolist() == [i * comm.world_size] and sums[i].done()
        expected = [10.0 * i + rank for rank in range(comm.world_size) for _ in range(3)]
        assert gathers[i].wait().tolist() == expected
    return comm.send_recv(torch.ones(1), 1 - comm.rank, torch.ones(1), 1 - comm.rank).item()  # nothing is left over


def test_several_under_way_at_once():
    assert pooled(under_way, 2) == [1.0, 1.0]


def in_a_group(comm):
    group = comm.split([0, 2] if comm.rank % 2 == 0 else [1, 3])
    x = torch.arange(4.0) + 10 * comm.rank
    return group.reduce_scatter(x).tolist(), group.all_gather(x[:1]).tolist()


def test_in_a_sub_group():
    assert pooled(in_a_group, 4) == [([20.0, 22.0], [0.0, 20.0]), ([40.0, 42.0], [10.0, 30.0]),
                                     ([24.0, 26.0], [0.0, 20.0]), ([44.0, 46.0], [10.0, 30.0])]


def taken(comm, chunk):
    """{what: bytes that the allocator gave} of collectives on N chunks, into tensors that are there."""
    x, out = torch.ones(comm.world_size * chunk // 4), torch.ones(chunk // 4)
    works = {"reduce_scatter": lambda: comm.reduce_scatter(x, out=out),
             "reduce_scatter in place": lambda: comm.reduce_scatter(x, out=x.chunk(comm.world_size)[comm.rank]),
             "all_gather": lambda: comm.all_gather(out, out=x),
             "gloo's reduce_scatter": lambda: dist.reduce_scatter_tensor(out, x)
             if not hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_single(out, x)}
    found = {}
    for name, work in works.items():
        with memory.measure("cpu") as m:
            work()
        found[name] = m.peak
    return found


def test_bytes_that_are_taken_on_the_way():
    chunk, small = 100_000, 1000
    for found in pooled(taken, 4, chunk):
        assert found["all_gather"] <= small
        assert found["reduce_scatter in place"] <= 3 * chunk + small and found["reduce_scatter"] <= 3 * chunk + small
        assert found["gloo's reduce_scatter"] >= 4 * chunk  # a copy of the whole


def late(comm):
    """A megabyte to a rank that comes late."""
    if comm.rank == 1:
        torch.ones(10**6).cumsum(0)
    handle = comm.all_gather(torch.full((250_000,), float(comm.rank)), async_op=True)
    return handle.wait().chunk(2)[1 - comm.rank].unique().tolist()


def test_messages_larger_than_what_a_socket_holds():
    assert pooled(late, 2) == [[1.0], [0.0]]


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
