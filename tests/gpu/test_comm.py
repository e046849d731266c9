"""Ranks on CUDA: several on one GPU through host memory, one on each by NCCL; what their allocators and meters say."""

import pytest
import torch

from refimpl import memory
from refimpl.comm import CollectiveMismatch, RankError, launch, ring_all_reduce, ring_traffic

MiB = 2**20


def every_collective(comm):
    """Each collective on tensors of this rank's GPU, against what it means; returns (device, traffic)."""
    N, r, device = comm.world_size, comm.rank, comm.device
    xs = [torch.arange(12.0, device=device) + 100 * rank for rank in range(N)]
    x, total = xs[r], torch.stack(xs).sum(0)
    assert device.type == "cuda" and torch.cuda.current_device() == device.index
    assert torch.equal(comm.all_reduce(x), total) and torch.equal(x, xs[r])
    assert torch.equal(comm.all_reduce(x, "max"), xs[-1])
    assert torch.equal(comm.reduce_scatter(x), total.chunk(N)[r])
    assert torch.equal(comm.all_gather(x), torch.cat(xs))
    assert torch.equal(comm.all_gather(x.bool()), torch.cat(xs).bool())
    assert torch.equal(comm.all_gather(x.bfloat16()), torch.cat(xs).bfloat16())
    assert torch.equal(comm.all_to_all(x), torch.cat([other.chunk(N)[r] for other in xs]))
    assert torch.equal(comm.broadcast(x, N - 1), xs[-1])
    pending = comm.all_reduce(x, async_op=True), comm.all_gather(x, async_op=True)
    assert torch.equal(pending[1].wait(), torch.cat(xs)) and torch.equal(pending[0].wait(), total)
    if N > 1:
        assert torch.equal(comm.send_recv(x, (r + 1) % N, x, (r - 1) % N), xs[r - 1])
        assert torch.equal(ring_all_reduce(comm, x), total)
        pair = comm.split([r // 2 * 2, r // 2 * 2 + 1])
        assert torch.equal(pair.all_reduce(x), xs[r // 2 * 2] + xs[r // 2 * 2 + 1])
    assert comm.all_reduce(torch.tensor(1)).item() == N  # the host's tensors travel too
    y = x.clone()
    assert comm.all_reduce(y, out=y) is y and torch.equal(y, total)
    comm.barrier()
    return str(device), comm.traffic


def test_four_ranks_share_one_gpu():
    results = launch(every_collective, 4, device="cuda:0", debug=True)
    assert [device for device, _ in results] == ["cuda:0"] * 4
    for rank, (_, traffic) in enumerate(results):
        assert traffic["reduce_scatter"] == ring_traffic("reduce_scatter", 48, 4, rank=rank)
        assert traffic["all_to_all"] == ring_traffic("all_to_all", 48, 4, rank=rank)


def test_nccl_with_one_gpu_for_each_rank():
    gpus = torch.cuda.device_count()
    world_size = max(n for n in (1, 2, 4) if n <= gpus)
    devices = [device for device, _ in launch(every_collective, world_size)]
    assert devices == [f"cuda:{rank}" for rank in range(world_size)]


def read_the_allocator(comm):
    """Rank r holds r+1 MiB; what this process's own allocator and meters say of it."""
    with memory.track() as t, memory.measure(comm.device) as m:
        x = torch.ones((comm.rank + 1) * MiB // 4, device=comm.device)
        total = comm.all_reduce(x[: MiB // 4])
    host = t.on("cpu").peak["communication"] if "cpu" in t.devices else 0
    return {"allocated": torch.cuda.memory_allocated(), "measured": m.net, "tracked": t.on("cuda:0").now,
            "host": host, "result": total.unique().item(), "trace": t}


@pytest.mark.bytes
def test_each_of_four_ranks_reads_its_own_cuda_statistics():
    for rank, read in enumerate(launch(read_the_allocator, 4, device="cuda:0")):
        expected = (rank + 1) * MiB + MiB  # x and the result
        assert read["allocated"] == read["measured"] == read["tracked"].total == expected
        assert read["tracked"]["communication"] == MiB
        assert read["host"] == MiB  # the staging copy
        assert read["result"] == 4
        assert type(read["trace"]) is memory.Trace


def test_nothing_is_staged_under_nccl():
    read, = launch(read_the_allocator, 1, device="cuda:0")
    assert read["host"] == 0 and read["tracked"]["communication"] == MiB


def test_results_arrive_on_the_host():
    def fn(comm):
        model = torch.nn.Linear(2, 2, device=comm.device)
        return model, {"x": [torch.full((2,), float(comm.rank), device=comm.device, requires_grad=True)]}

    for rank, (model, held) in enumerate(launch(fn, 2, device="cuda:0")):
        x = held["x"][0]
        assert x.device.type == "cpu" and x.tolist() == [rank, rank] and x.requires_grad
        assert isinstance(model.weight, torch.nn.Parameter) and model.weight.device.type == "cpu"


def test_a_tensor_on_the_gpu_does_not_travel_to_ranks(cuda):
    x = torch.ones(2, device=cuda)
    with pytest.raises(TypeError, match="closure variable 'x' cannot be pickled.*cuda.*cpu"):
        launch(lambda comm: x, 2)


def test_tensors_on_different_devices_are_named():
    def fn(comm):
        comm.all_reduce(torch.ones(3, device="cpu" if comm.rank == 1 else comm.device))

    with pytest.raises(CollectiveMismatch, match="rank 1 differs"):
        launch(fn, 3, device="cuda:0", debug=True)


def test_a_rank_that_dies_beside_others_on_its_gpu_is_named():
    def fn(comm):
        x = torch.ones(100, device=comm.device)
        if comm.rank == 2:
            torch.empty(2**50, dtype=torch.uint8, device=comm.device)
        comm.all_reduce(x)

    with pytest.raises(RankError, match="rank 2 raised torch.OutOfMemoryError"):
        launch(fn, 4, device="cuda:0")


def test_by_default_ranks_are_on_the_gpus():
    count = torch.cuda.device_count()
    assert launch(lambda comm: str(comm.device), 2) == [f"cuda:{rank % count}" for rank in range(2)]
