"""The fake communicator against the real one: same shapes, same traffic, same bytes by category."""

import itertools
import math

import pytest
import torch
from rank_pool import on_ranks, pooled
from torch._subclasses.fake_tensor import FakeTensor

from refimpl import memory
from refimpl.comm import FakeCommunicator


def program(comm):
    """Something of everything; returns shapes. All ranks hold the same tensors."""
    N = comm.world_size
    x = torch.ones(N * 6, 5)
    row = comm.split([rank for rank in range(N) if rank % 2 == comm.rank % 2])
    results = [comm.all_reduce(x), comm.all_reduce(x, "avg"), comm.all_gather(x), comm.reduce_scatter(x, "max"),
               comm.all_to_all(x), comm.broadcast(x, 1), row.all_gather(x[:, 0]), comm.all_gather(x.bool()),
               comm.all_gather(torch.tensor(2.0)), comm.reduce_scatter(x, "product"),
               comm.send_recv(x, (comm.rank + 1) % N, x, (comm.rank - 1) % N)]
    results.append(comm.reduce_scatter(x, out=torch.empty(6, 5), async_op=True).wait())
    if comm.rank % 2 == 0 and comm.rank + 1 < N:
        comm.send(x, comm.rank + 1)
    elif comm.rank % 2:
        results.append(comm.recv(x, comm.rank - 1))
    comm.barrier()
    return [(tuple(result.shape), result.dtype) for result in results], results


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks("world_size")
def test_same_shapes_values_traffic_and_bytes_as_real_ranks(comm, world_size):
    with memory.track() as t:
        shapes, results = program(comm)
    fake = FakeCommunicator(comm.rank, world_size)
    fake_shapes, fake_results = program(fake)
    assert fake_shapes == shapes and all(torch.equal(a, b) for a, b in zip(fake_results, results, strict=True))
    fake.reset_traffic()
    dry = memory.dry_run(program, fake)
    assert dry.result[0] == shapes and fake.traffic == comm.traffic
    assert dry.peak == t.peak and dry.peak["communication"] > 0


COLLECTIVES = {
    "all_reduce": lambda comm, x, op, **how: comm.all_reduce(x, op, **how),
    "reduce_scatter": lambda comm, x, op, **how: comm.reduce_scatter(x, op, **how),
    "all_gather": lambda comm, x, op, **how: comm.all_gather(x, **how),
    "all_to_all": lambda comm, x, op, **how: comm.all_to_all(x, **how),
    "broadcast": lambda comm, x, op, **how: comm.broadcast(x, comm.world_size - 1, **how),
    "send_recv": lambda comm, x, op, **how: comm.send_recv(x, (comm.rank + 1) % comm.world_size, x,
                                                           (comm.rank - 1) % comm.world_size, **how)}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn]


def every_case():
    for name, dtype, shape in itertools.product(COLLECTIVES, DTYPES, [(), (0,), (4,), (6,), (6, 0), (6, 2)]):
        for op in ("sum", "avg", "max", "min", "product") if "reduce" in name else ("sum",):
            yield name, dtype, shape, op, "contiguous", False
        if dtype in (torch.float32, torch.complex64) and len(shape) and shape[0]:
            for layout, in_place in itertools.product(("contiguous", "strided"), (False, True)):
                yield name, dtype, shape, "sum", layout, in_place


def one_case(comm, name, dtype, shape, op, layout, in_place):
    """What it gives or refuses, what was sent, and the sizes of the buffers it took."""
    before = comm.traffic
    x = (torch.arange(math.prod(shape)) % 2).view(shape).to(dtype)
    if layout == "strided":
        x = x.repeat_interleave(2, dim=0)[::2]
    y = values = None
    with memory.track(x) as t:
        try:
            y = COLLECTIVES[name](comm, x, op, **({"out": x} if in_place else {}))
            result = tuple(y.shape), y.dtype, y.is_contiguous()
        except (ValueError, TypeError) as error:
            result = f"{type(error).__name__}: {error}"
    if y is not None and not isinstance(y, FakeTensor):
        values = y.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8).tolist()
    taken = [record.nbytes for record in t.records if record.mark == "communication"]
    return (result, dict(comm.traffic - before), taken, t.peak["communication"]), values


def every_result(comm):
    return [one_case(comm, *case) for case in every_case()]


def test_every_collective_on_every_dtype_shape_and_layout_as_real_ranks():
    for rank, read in enumerate(pooled(every_result, 3)):
        comm = FakeCommunicator(rank, 3)
        dry = memory.dry_run(every_result, comm).result
        for case, found, expected, (shape_only, _) in zip(every_case(), every_result(comm), read, dry, strict=True):
            assert found == expected and shape_only == expected[0], case


def test_this_ranks_chunk_of_out_may_be_gathered():
    comm = FakeCommunicator(1, 3)
    out = torch.arange(6.0)
    assert comm.all_gather(out[2:4], out=out).tolist() == [2, 3] * 3


def test_rank_0_of_1024_needs_nobody():
    def step(comm):
        comm.reduce_scatter(comm.all_gather(torch.empty(2**20)), "avg")

    comm = FakeCommunicator(0, 1024)
    t = memory.dry_run(step, comm)
    assert t.peak.total == 4 * 2**30 + 4 * 2**20 and t.now["communication"] == 0
    assert comm.traffic == {"all_gather": 1023 * 4 * 2**20, "reduce_scatter": 1023 * 4 * 2**20}


@on_ranks(1)
def test_a_real_communicator_refuses_fake_tensors(comm):
    with pytest.raises(TypeError, match="FakeCommunicator"):
        memory.dry_run(lambda: comm.all_reduce(torch.zeros(2)))


def test_a_sub_group_counts_in_its_parent_too():
    comm = FakeCommunicator(5, 8)
    assert comm.split([0, 1]) is None
    row = comm.split([4, 5, 6, 7])
    pair = row.split([0, 1])
    assert (row.rank, row.world_size, row.ranks, pair.rank, pair.ranks) == (1, 4, (4, 5, 6, 7), 1, (4, 5))
    pair.all_gather(torch.zeros(10))
    assert pair.traffic == row.traffic == comm.traffic == {"all_gather": 40}
    row.reset_traffic()
    assert row.traffic.total == 0 and comm.traffic.total == 40


@pytest.mark.parametrize("rank, world_size, name", [(0, 0, "world_size=0"), (4, 4, "rank=4"), (0, -1, "world_size=-1"),
                                                    (-1, 2, "rank=-1"), (0, 2.0, "world_size=2.0")])
def test_a_rank_that_cannot_be_is_named(rank, world_size, name):
    with pytest.raises(ValueError, match=name):
        FakeCommunicator(rank, world_size)


def test_bad_input_is_refused_as_by_the_real_one():
    comm = FakeCommunicator(0, 2)
    with pytest.raises(ValueError, match="op='mean'"):
        comm.all_reduce(torch.zeros(2), "mean")
    with pytest.raises(ValueError, match=r"\(3,\)"):
        comm.reduce_scatter(torch.zeros(3))


def test_the_copy_that_makes_an_argument_contiguous_is_communication_until_the_end():
    x = torch.ones(10, 100).t()
    with memory.track(x) as t:
        handle = FakeCommunicator(0, 2).all_gather(x, async_op=True)
        assert t.now["communication"] == x.nbytes + 2 * x.nbytes  # the copy, and the result
        result = handle.wait()
        assert t.now["communication"] == result.nbytes
