"""Exercises of the page *ZeRO-3*."""

import torch

from refimpl import memory
from refimpl.zero import Zero3

from . import exercise, launch

WIDTH, NBYTES = 64, 4 * 64 * 64  # of a layer: its features, and the bytes of its weight
DECAY, STEPS = 0.9, 3


def _layers(number):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(number)))


def _near(found, right):
    return isinstance(found, torch.Tensor) and found.shape == right.shape and (
        (found - right).norm() < 1e-5 * right.norm()).item()


OUT = 128


def _weight():
    return torch.randn(OUT, WIDTH, generator=torch.Generator().manual_seed(0))


def _inputs(rank):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1 + rank))


def _sharded(comm, sharded_linear):
    """Return (output, gradients of x and of the shard, bytes kept until backward, bytes sent) of this rank."""
    shard = _weight().flatten().chunk(comm.world_size)[comm.rank].clone().requires_grad_()
    x = _inputs(comm.rank).requires_grad_()
    with memory.track(shard, x) as t:
        y = sharded_linear(comm, shard, x, OUT)
        kept = t.now.total - t.start.total - (y.nbytes if isinstance(y, torch.Tensor) else 0)
        if isinstance(y, torch.Tensor) and y.requires_grad:
            y.square().sum().backward()
    return (y.detach() if isinstance(y, torch.Tensor) else y), x.grad, shard.grad, kept, comm.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def first(sharded_linear):
    """Grade `sharded_linear(comm, shard, x, out)`, which returns x Wᵀ. `shard` is this rank's 1/N of W, flat, of shape
    (out, features). W is whole in forward and in backward, and not between; `shard.grad` is a mean over ranks."""
    for N in (2, 4):
        weight = _weight().requires_grad_()
        xs = [_inputs(rank).requires_grad_() for rank in range(N)]
        expected = [x @ weight.T for x in xs]
        sum(y.square().sum() for y in expected).backward()
        mean = (weight.grad / N).flatten().chunk(N)
        sent = 3 * (N - 1) * weight.nbytes // N
        answers = launch(_sharded, N, sharded_linear, device="cpu")
        for rank, (y, of_x, of_shard, kept, traffic) in enumerate(answers):
            where = f"rank {rank} of {N}"
            if not _near(y, expected[rank]):
                return f"{where}: the output is not x Wᵀ"
            for name, found, right in (("x", of_x, xs[rank].grad), ("the shard", of_shard, mean[rank])):
                if not _near(found, right):
                    return f"{where}: {name} has no gradient, or another one"
            if kept > 1024:
                return f"the numbers are right, but {kept:,} bytes stay from forward to backward besides the output"
            if traffic != sent:
                return f"the numbers are right, but a rank sent {traffic:,} bytes; three times (N-1)/N is {sent:,}"
    return None


def _averaged(comm, average):
    """Return what the last `update` returned, the shards of the average of whole weights, and of the reader's calls
    the most bytes that one took, the bytes that stay, and the bytes sent."""
    engine = Zero3(_layers(8), comm, look_ahead=0)
    whole, taken, sent = _whole(engine), 0, 0
    before = comm.traffic.total
    with memory.track(engine.model, engine.optimizer) as t:
        update = average(engine, DECAY)
    taken, stays, sent = t.peak.total - t.start.total, t.now.total - t.start.total, comm.traffic.total - before
    for step in range(STEPS):
        engine.backward(engine(torch.full((2, WIDTH), 1.0 + step + comm.rank)).sum())
        engine.step()
        before = comm.traffic.total
        with memory.track(engine.model, engine.optimizer) as t:
            found = update()
        taken, sent = max(taken, t.peak.total - t.start.total), sent + comm.traffic.total - before
        stays += t.now.total - t.start.total
        whole = [old * DECAY + new * (1 - DECAY) for old, new in zip(whole, _whole(engine), strict=True)]
    expected = [bucket.shard(flat, comm.rank) for bucket, flat in zip(engine.buckets, whole, strict=True)]
    return found, expected, taken, stays, sent


def _whole(engine):
    """Return all parameters of each bucket, flat."""
    with engine.gathered():
        return [engine.parameters.whole[bucket].clone() for bucket in engine.buckets]


@exercise("parity and bytes", callable, process="ranks")
def second(average):
    """Grade `average(engine, decay)`, which returns a function `update()`. Called after each step, that returns [this
    rank's shard of the running average of the weights] in the order of `engine.buckets`; Ψ/N bytes, nothing sent."""
    share = 8 * NBYTES // 2
    for rank, (found, expected, taken, stays, sent) in enumerate(launch(_averaged, 2, average, device="cpu")):
        if not isinstance(found, (list, tuple)) or len(found) != len(expected):
            return f"expected a list of {len(expected)} shards, one for each bucket; you return {found!r}"
        for number, (mine, right) in enumerate(zip(found, expected, strict=True)):
            if not _near(mine, right):
                return f"shard {number} on rank {rank} is not that of the average after {STEPS} steps"
        if sent:
            return f"the average is right, but {sent:,} bytes were sent for it; each rank has all that it needs"
        if max(taken, stays) > share + NBYTES:
            return (f"the average is right, but it took {max(taken, stays):,} bytes; a rank's share of the weights "
                    f"is {share:,}")
    return None
