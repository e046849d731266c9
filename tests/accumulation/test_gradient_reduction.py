"""Data-parallel: one gradient of all ranks' rows, and one reduction a step, by the bytes that travel."""

import pytest
import torch
import torch.distributed as dist
from ragged_kit import batch, gradients, mine, whole
from rank_pool import on_ranks, pooled
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from refimpl import memory
from refimpl.accumulation import accumulate, accumulation_traffic, count_targets, split
from refimpl.accumulation.gradient_reduction import AveragedByEngine
from refimpl.comm import FakeCommunicator
from refimpl.model import GPT, GPTConfig
from refimpl.zero import DataParallel

CONFIG = GPTConfig(vocab_size=61, context_length=16, layers=1, hidden=16, heads=2)


def model(dtype=torch.float64):
    torch.manual_seed(0)
    return GPT(CONFIG, dtype=dtype)


def distance(ours, theirs):
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(ours, theirs, strict=True))


def with_communicator(comm, micro_batch, dtype=torch.float64, steps=1):
    """(loss, gradients, bytes sent) of accumulate on this rank's rows."""
    net, before = model(dtype), comm.traffic
    for _ in range(steps):
        net.zero_grad()
        loss = accumulate(net, *mine(comm), micro_batch=micro_batch, comm=comm)
    return loss, gradients(net), (comm.traffic - before).total


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_gradient_is_that_of_all_ranks_rows_and_travels_once(world_size):
    net, sent = model(), {}
    loss, expected = whole(net, *batch())
    for micro_batch in (1, 2, 100):
        results = pooled(with_communicator, world_size, micro_batch, device="cpu")
        for said, found, _ in results:
            assert torch.isclose(said, loss) and distance(found, expected) <= 2e-6
        sent[micro_batch] = [traffic for _, _, traffic in results]
    assert sent[1] == sent[2] == sent[100] == [
        accumulation_traffic(net.parameters(), world_size, rank) for rank in range(world_size)]


def test_the_sums_travel_in_fp32_and_every_step_alike():
    count, expected = CONFIG.parameter_count(), accumulation_traffic(model(torch.bfloat16).parameters(), 2)
    assert 4 * count <= expected <= 4 * count + 100
    for _, found, sent in pooled(with_communicator, 2, 1, torch.bfloat16, 3, device="cpu"):
        assert sent == 3 * expected and all(each.dtype is torch.bfloat16 for each in found)


def test_a_reduction_in_every_micro_batch_is_seen():
    def mutant(comm, micro_batch):
        net, (tokens, targets) = model(), batch()
        for part in zip(tokens[:8].split(micro_batch), targets[:8].split(micro_batch), strict=True):
            net(*part).backward()
            for parameter in net.parameters():
                comm.all_reduce(parameter.grad, out=parameter.grad)
        return comm.traffic.total
    once = accumulation_traffic(model().parameters(), 2)
    for micro_batch in (8, 4, 2):
        sent = pooled(mutant, 2, micro_batch, device="cpu")[0]
        assert abs(sent - once * 8 // micro_batch) <= 100 * 8 // micro_batch


def with_ddp(comm, micro_batch, honoured=True):
    """(gradients, bytes of the buckets that DDP reduced) of accumulate on a DDP model in fp64."""
    sent = [0]
    def count(state, bucket):
        sent[0] += bucket.buffer().nbytes
        done = dist.all_reduce(bucket.buffer(), group=comm._group, async_op=True).get_future()
        return done.then(lambda reduced: reduced.value()[0] / comm.world_size)
    ddp, rows = DistributedDataParallel(model(), process_group=comm._group), mine(comm)
    ddp.register_comm_hook(None, count)
    if not honoured:
        ddp.no_sync, rows = torch.enable_grad, [each[:4] for each in batch()]  # a context that holds nothing back
    return accumulate(ddp, *rows, micro_batch=micro_batch), gradients(ddp.module), sent[0]


def test_ddp_reduces_once_and_its_gradient_is_that_of_all_rows():
    (loss, expected), nbytes = whole(model(), *batch()), 8 * CONFIG.parameter_count()
    for world_size, micro_batch in ((2, 2), (3, 1)):
        for said, found, sent in pooled(with_ddp, world_size, micro_batch, device="cpu"):
            assert torch.isclose(said, loss) and distance(found, expected) <= 2e-6 and sent == nbytes
    assert pooled(with_ddp, 2, 1, False, device="cpu")[0][2] == 4 * nbytes, "the mutant, whose no_sync does nothing"


@on_ranks(2, device="cpu")
def test_parameters_without_gradient_and_those_that_one_rank_uses(comm):
    torch.manual_seed(0)
    net = nn.ModuleDict({name: nn.Linear(3, 1).bfloat16() for name in ("both", "first", "nobody")})
    def loss_fn(net, x):
        return (net["both"](x) + (net["first"](x) if comm.rank == 0 else 0)).float().mean()
    accumulate(net, torch.ones(4 - comm.rank, 3).bfloat16(), micro_batch=2, loss_fn=loss_fn, comm=comm)
    assert net["both"].bias.grad.item() == 1 and net["nobody"].bias.grad is None
    assert abs(net["first"].bias.grad.item() - 4 / 7) <= 2**-9  # of 7 rows, rank 0 has 4


def test_what_cannot_be_summed_over_ranks_says_so():
    comm, x, net = FakeCommunicator(0, 2), torch.ones(4, 2), nn.Linear(2, 1)
    def loss_fn(net, x):
        return net(x).float().mean()
    net(x).sum().backward()
    with pytest.raises(ValueError, match=r"would be summed over ranks a second time: call optimizer.zero_grad\(\)"):
        accumulate(net, x, micro_batch=2, loss_fn=loss_fn, comm=comm)
    class Reduces(nn.Linear):
        no_sync = None

    net = Reduces(2, 1).bfloat16()
    with pytest.raises(ValueError, match=r"Reduces reduces gradients itself, in torch.bfloat16: .*dtype=None"):
        accumulate(net, x.bfloat16(), micro_batch=2, loss_fn=loss_fn, comm=comm)
    with pytest.raises(TypeError, match="comm=3: expected a Communicator, such as comm.launch gives each rank"):
        accumulate(nn.Linear(2, 1), x, micro_batch=2, loss_fn=loss_fn, comm=3)
    with pytest.raises(ValueError, match="every target of the batch is ignored"):
        accumulate(nn.Linear(2, 1), x, micro_batch=2, loss_fn=loss_fn, comm=comm, count=lambda x: 0)


@on_ranks(2, device="cpu")
def test_a_model_of_fsdp2_is_refused(comm):
    """It would be taken for one that reduces nothing: reductions in every micro-batch, and a mean of the ranks' means.

    The loop that the message tells of gives the gradient of all ranks' rows.
    """
    net, rows = model(), [slice(0, 4), slice(6, 9)][comm.rank]  # those between have no target
    fully_shard(net, mesh=init_device_mesh("cpu", (comm.world_size,)))
    batch_here = [each[rows] for each in batch()]
    with pytest.raises(ValueError, match="FSDPGPT was made by fully_shard.*Write the loop by hand: .*split"):
        accumulate(net, *batch_here, micro_batch=2)
    assert all(parameter.grad is None for parameter in net.parameters())
    n, parts = count_targets(batch()[1]), split(batch_here, 2)
    for number, part in enumerate(parts, 1):
        net.set_requires_gradient_sync(number == len(parts))
        (net(*part) * count_targets(*part) / n * comm.world_size).backward()
    _, expected = whole(model(), *batch())
    assert distance([parameter.grad.full_tensor() for parameter in net.parameters()], expected) <= 2e-6


def test_a_rank_in_a_dry_run():
    def step(comm):
        tokens = torch.zeros(8, 16, dtype=torch.int64)
        accumulate(GPT(CONFIG, dtype=torch.bfloat16), tokens, tokens, micro_batch=2, comm=comm)
    comm = FakeCommunicator(0, 1024)
    in_a_rank, alone = (memory.dry_run(step, each).peak.total for each in (comm, None))
    assert comm.traffic["all_reduce"] == accumulation_traffic(model(torch.bfloat16).parameters(), 1024)
    assert in_a_rank <= alone + 256, "the reduction is in place"


def test_the_traffic_foretold_is_that_of_rank_0_unless_another_is_named():
    """Three ranks do not divide the sizes, so that they send different numbers of bytes."""
    net, sent = nn.Linear(5, 2), []
    for rank in range(3):
        comm = FakeCommunicator(rank, 3)
        net.zero_grad()
        accumulate(net, torch.ones(2, 5), torch.ones(2, 2), micro_batch=1, comm=comm,
                   loss_fn=lambda net, x, y: (net(x) - y).square().mean())
        sent.append(comm.traffic.total)
    assert sent == [accumulation_traffic(net.parameters(), 3, rank) for rank in range(3)] and len({*sent}) > 1
    assert sent[0] == accumulation_traffic(net.parameters(), 3) != sent[1]


def test_one_rank_sends_nothing():
    assert accumulation_traffic(model().parameters(), 1) == 0


def test_gradients_are_zeros_in_a_micro_batch_without_weight_and_in_no_later_one():
    net, found = nn.Linear(2, 1), []
    ranks = AveragedByEngine(DataParallel(net, FakeCommunicator(0, 1), torch.optim.SGD), list(net.parameters()))
    for weight in (0, 1):
        with ranks.micro_batch(last=True, weight=weight):
            ranks.backward(net(torch.ones(3, 2)).sum())
        found.append(net.bias.grad.item())
    assert found == [0, 3]
