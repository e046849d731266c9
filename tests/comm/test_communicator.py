"""Each collective against what it means, computed from every rank's tensor in one place; with what it counts."""

import pytest
import torch
import torch.distributed as dist
from rank_pool import failure, on_ranks, pooled

from refimpl import memory
from refimpl.comm import Communicator, ring_traffic

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64]
MOVED = [*DTYPES, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]
OPS = {"sum": lambda xs: torch.stack(xs).sum(0), "max": lambda xs: torch.stack(xs).amax(0),
       "min": lambda xs: torch.stack(xs).amin(0), "product": lambda xs: torch.stack(xs).prod(0)}


def given_to(rank, shape=(12, 3), dtype=torch.float32):
    """Every rank can compute what any rank was given. Small integers, so that no sum depends on its order."""
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def everyones(comm, **how):
    return [given_to(rank, **how) for rank in range(comm.world_size)]


def same(result, expected):
    return result.shape == expected.shape and result.dtype == expected.dtype and bool((result == expected).all())


def check_reductions(comm):
    for dtype in DTYPES:
        x, xs = given_to(comm.rank, dtype=dtype), everyones(comm, dtype=dtype)
        for op, reduce in OPS.items():
            expected = reduce(xs).to(dtype)
            assert same(comm.all_reduce(x, op), expected), (dtype, op)
            assert same(comm.reduce_scatter(x, op), expected.chunk(comm.world_size)[comm.rank]), (dtype, op)
        if dtype.is_floating_point:
            expected = OPS["sum"](xs) / comm.world_size
            torch.testing.assert_close(comm.all_reduce(x, "avg"), expected)
            torch.testing.assert_close(comm.reduce_scatter(x, "avg"), expected.chunk(comm.world_size)[comm.rank])
        assert same(x, given_to(comm.rank, dtype=dtype)), "the argument was changed"
    bools = everyones(comm, dtype=torch.bool)
    for op, expected in {"sum": torch.stack(bools).any(0), "max": torch.stack(bools).any(0),
                         "product": torch.stack(bools).all(0), "min": torch.stack(bools).all(0)}.items():
        assert same(comm.all_reduce(bools[comm.rank], op), expected), op


def check_moves(comm):
    N, r = comm.world_size, comm.rank
    for dtype in MOVED:
        x, xs = given_to(r, dtype=dtype), everyones(comm, dtype=dtype)
        moved = [(comm.all_gather(x), torch.cat(xs)), (comm.broadcast(x, N - 1), xs[N - 1]),
                 (comm.all_to_all(x), torch.cat([other.chunk(N)[r] for other in xs]))]
        if N > 1:
            moved.append((comm.send_recv(x, (r + 1) % N, torch.empty_like(x), (r - 1) % N), xs[(r - 1) % N]))
        for result, expected in moved:
            assert same(result.view(torch.uint8), expected.view(torch.uint8)) and result.dtype == dtype, dtype
    assert same(comm.all_gather(torch.tensor(float(r))), torch.arange(float(N)))
    comm.barrier()


def check_layouts(comm):
    N, r = comm.world_size, comm.rank
    strided = given_to(r, (3, 12)).t()
    assert not strided.is_contiguous()
    xs = [given_to(rank, (3, 12)).t() for rank in range(N)]
    assert same(comm.all_reduce(strided), OPS["sum"](xs)) and same(comm.all_gather(strided), torch.cat(xs))
    out = torch.empty(3, 12 * N).t()
    assert comm.all_gather(strided, out=out) is out and same(out, torch.cat(xs))
    assert same(comm.all_reduce(torch.empty(0, 4)), torch.empty(0, 4))
    parameter = torch.nn.Parameter(given_to(r))
    assert not comm.all_reduce(parameter).requires_grad
    assert comm.broadcast(parameter, 0, out=parameter) is parameter and same(parameter.detach(), given_to(0))


def check_bits(comm):
    """Tensors that hold other numbers than they show, and empty ones with odd strides."""
    N, r = comm.world_size, comm.rank
    z = torch.tensor([1 + 2j, 3 + 4j]).conj()
    assert comm.all_gather(z).tolist() == [1 - 2j, 3 - 4j] * N and comm.broadcast(z, 0).tolist() == [1 - 2j, 3 - 4j]
    negative = z.imag[:1]
    assert negative.is_neg() and negative.is_contiguous()
    assert comm.all_gather(negative).tolist() == [-2] * N
    assert comm.all_reduce(negative, out=negative).tolist() == [-2 * N] and negative.tolist() == [-2 * N]
    for dtype in (torch.complex64, torch.float32, torch.bool):
        empty = torch.empty(0, dtype=dtype).as_strided((0,), (2,))
        assert comm.all_gather(empty).shape == comm.all_to_all(empty).shape == comm.broadcast(empty, 0).shape == (0,)
        if N > 1:
            assert comm.send_recv(empty, (r + 1) % N, empty, (r - 1) % N).shape == (0,)


def check_out(comm):
    N, r, x, xs = comm.world_size, comm.rank, given_to(comm.rank), everyones(comm)
    assert comm.all_reduce(x, out=x) is x and same(x, OPS["sum"](xs))
    full = torch.zeros(12 * N, 3)
    mine = full.chunk(N)[r]
    mine.copy_(given_to(r))
    assert comm.all_gather(mine, out=full) is full and same(full, torch.cat(xs))
    x = given_to(r)
    mine = x.chunk(N)[r]
    assert comm.reduce_scatter(x, out=mine) is mine and same(mine, OPS["sum"](xs).chunk(N)[r])
    shard = torch.empty(12 // N, 3)
    assert comm.reduce_scatter(given_to(r), out=shard) is shard and same(shard, OPS["sum"](xs).chunk(N)[r])


def check_handles(comm):
    N, r = comm.world_size, comm.rank
    x, xs = given_to(r), everyones(comm)
    handles = {"all_reduce": comm.all_reduce(x, async_op=True), "all_gather": comm.all_gather(x, async_op=True),
               "reduce_scatter": comm.reduce_scatter(x, async_op=True), "all_to_all": comm.all_to_all(x, async_op=True),
               "broadcast": comm.broadcast(x, 0, async_op=True), "bytes": comm.all_gather(x.bool(), async_op=True)}
    results = {name: handle.wait() for name, handle in reversed(handles.items())}
    assert all(handle.done() for handle in handles.values()) and handles["all_reduce"].wait() is results["all_reduce"]
    assert same(results["all_reduce"], OPS["sum"](xs)) and same(results["all_gather"], torch.cat(xs))
    assert same(results["reduce_scatter"], OPS["sum"](xs).chunk(N)[r]) and same(results["broadcast"], xs[0])
    assert same(results["bytes"], torch.cat(xs).bool())
    if N > 1:
        sending = comm.send(x, (r + 1) % N, async_op=True)
        came = comm.recv(x, (r - 1) % N, async_op=True)
        assert same(came.wait(), xs[(r - 1) % N]) and sending.wait() is None


def check_traffic(comm):
    N, r = comm.world_size, comm.rank
    x = torch.zeros(N * 4, 3)
    B, before = x.nbytes, comm.traffic
    comm.all_reduce(x)
    comm.all_gather(x.chunk(N)[r])
    comm.reduce_scatter(x)
    comm.all_to_all(x)
    comm.barrier()
    part = (N - 1) * B // N
    expected = {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "all_to_all": part}
    assert comm.traffic - before == expected
    before = comm.traffic
    comm.all_reduce(torch.zeros(N + 1, dtype=torch.float64))
    assert (comm.traffic - before)["all_reduce"] == ring_traffic("all_reduce", 8 * (N + 1), N, rank=r, itemsize=8)
    comm.reset_traffic()
    comm.broadcast(x, 1 % N)
    assert comm.traffic == ({"broadcast": B if r != 0 else 0} if N > 1 else {})


CHECKS = (check_reductions, check_moves, check_layouts, check_bits, check_out, check_handles, check_traffic)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks("world_size")
def test_every_collective_is_what_it_says_and_counts_what_it_sends(comm, world_size):
    for check in CHECKS:
        check(comm)


@on_ranks(2)
def test_through_staging_copies_too(comm):
    """As if gloo could not read where the tensors are; tests/gpu has GPUs for it."""
    class Staging(Communicator):
        def _staged(self, x):
            return True

    staging = Staging(comm.rank, comm.world_size, group=comm._group)
    for check in CHECKS:
        check(staging)
    with memory.track() as t:
        x = torch.ones(1000)
        staging.all_reduce(x, out=x)
    with memory.track(x) as gather:
        staging.all_gather(x)
    assert (t.peak["communication"], t.now["communication"]) == (4000, 0)
    assert gather.peak.total == 4000 + 4000 + 8000 + 8000  # x and its copy, the landing and the result


@on_ranks(3, debug=True)
def test_in_debug_mode_too(comm):
    for check in CHECKS:
        check(comm)


def test_with_nccl_a_group_meets_before_anybody_can_send(monkeypatch):
    """NCCL connects a group in its first collective; a send between two of four would wait for the others."""
    met = []
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "barrier", lambda group, device_ids: met.append((group, device_ids)))
    comm = Communicator(2, 4, "cuda:2", "a group")
    assert met == [("a group", [2])]
    comm.barrier()
    assert met == [("a group", [2])] * 2
    Communicator(0, 1, "cuda:0", "alone")
    assert len(met) == 2


@on_ranks(2)
def test_what_is_sent_arrives_though_its_handle_is_dropped_and_what_was_waited_for_is_not_held(comm):
    """Rank 0 sends long before rank 1 receives, and holds nothing."""
    with memory.track() as t:
        if comm.rank == 0:
            comm.send(torch.ones(100_000), 1, async_op=True)
        comm.all_reduce(torch.ones(10), async_op=True).wait()
        assert comm.rank or t.now.total == 400_000
    comm.barrier()
    assert comm.rank == 0 or comm.recv(torch.empty(100_000), 0).sum() == 100_000


@on_ranks(2)
def test_a_tracker_reads_the_same_every_time(comm):
    """Of every collective in turn nothing is alive when all that it had is deleted."""
    other = 1 - comm.rank
    calls = [lambda x: comm.all_reduce(x, out=x), comm.all_reduce, comm.all_gather, comm.reduce_scatter,
             comm.all_to_all, lambda x: comm.broadcast(x, 0, out=x), lambda x: comm.send_recv(x, other, x, other),
             lambda x: comm.all_reduce(x, out=x, async_op=True).wait()]
    for number, call in enumerate(calls * 150):
        with memory.track() as t:
            x = torch.ones(1000)
            y = call(x)
            del x, y
            assert t.now.total == 0, number % len(calls)


@on_ranks(2)
def test_bad_input_is_refused_with_its_name_and_before_anything_is_sent(comm):
    x, other = torch.zeros(4), 1 - comm.rank
    for words, call in (
            ("ValueError: op='mean': expected one of sum, avg, max, min, product", lambda: comm.all_reduce(x, "mean")),
            ("op=['sum']", lambda: comm.all_reduce(x, ["sum"])), ("int64", lambda: comm.all_reduce(x.long(), "avg")),
            ("int16", lambda: comm.all_reduce(x.short())), ("torch.sparse_coo", lambda: comm.all_gather(x.to_sparse())),
            ("TypeError: a collective moves tensors, and this is list", lambda: comm.all_reduce([1.0])),
            ("meta", lambda: comm.all_reduce(torch.zeros(4, device="meta"))),
            ("nested", lambda: comm.all_gather(torch.nested.nested_tensor([x, x]))),
            ("quantized", lambda: comm.all_gather(torch.quantize_per_tensor(x, 0.1, 0, torch.quint8))),
            ("src=2: expected a rank from 0 to 1", lambda: comm.broadcast(x, 2)),
            ("src=-1", lambda: comm.broadcast(x, -1)), ("dst=7", lambda: comm.send(x, 7)),
            ("src=0.5", lambda: comm.recv(x, 0.5)), ("cannot send to itself", lambda: comm.send(x, comm.rank)),
            ("(3, 2)", lambda: comm.reduce_scatter(torch.zeros(3, 2))),
            ("()", lambda: comm.all_to_all(torch.tensor(1.0))), ("another out", lambda: comm.all_to_all(x, out=x)),
            ("out has shape (5,), torch.float32 on cpu: expected shape (8,)",
             lambda: comm.all_gather(x, out=torch.zeros(5))),
            ("torch.float64", lambda: comm.all_reduce(x, out=torch.zeros(4, dtype=torch.float64))),
            ("out=list", lambda: comm.all_reduce(x, out=[0.0])),
            ("its elements share memory", lambda: comm.all_reduce(x, out=torch.zeros(1).expand(4))),
            ("send_recv cannot write to the memory", lambda: comm.send_recv(x, other, x, other, out=x)),
            ("all_gather cannot", lambda: comm.all_gather(x[1:3], out=x)),
            ("all_gather cannot", lambda: comm.all_gather(x.chunk(2)[other], out=x)),
            ("all_reduce cannot", lambda: comm.all_reduce(x[:2], out=x[1:3])),
            ("reduce_scatter cannot", lambda: comm.reduce_scatter(x, out=x[1:3])),
            ("all_to_all cannot", lambda: comm.all_to_all(x[:2], out=x[1:3])),
            ("ranks has=2", lambda: comm.split([0, 2])), ("each once", lambda: comm.split([0, 0])),
            ("at least one rank", lambda: comm.split([])),
            ("TypeError: split(0): expected a list", lambda: comm.split(0))):
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        assert words in f"{error.typename}: {error.value}"
    assert comm.traffic.total == 0
    comm.barrier()


def step(comm):
    with memory.track() as t:
        x = torch.ones(1000)
        everyone = comm.all_gather(x)
        total = comm.all_reduce(x[::2])
        del x, everyone, total
    return t


def test_a_tracker_in_a_rank_sees_communication_and_its_trace_comes_back():
    for trace in pooled(step, 2):
        assert type(trace) is memory.Trace and trace.now.total == 0
        assert trace.peak["communication"] == 8000 + 2000 and trace.peak.total == 4000 + 8000 + 2000


def test_the_communicator_stays_in_its_rank():
    failure("rank 0 returned an unpicklable value: the result", lambda comm: comm, 1)
