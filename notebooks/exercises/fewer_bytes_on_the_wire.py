"""Exercises of the page *Fewer bytes on the wire*."""

import torch

from refimpl.comm.two_level import levels, two_level_traffic
from refimpl.papers import compression as paper

from . import exercise, launch

NUMEL, RATIO, STEPS = 4000, 0.01, 6


def _gradient(step, rank, numel=NUMEL):
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))


def _sent_by_topk(comm, numel, ratio):
    paper.TopK(comm, ratio).average("w", _gradient(0, comm.rank, numel))
    return comm.traffic.total


@exercise("bytes", int, process="call")
def first(predict):
    """Grade `predict(numel, ratio, world_size)`, which returns the bytes that each rank sends when top-k averages a
    gradient of `numel` fp32 numbers, of which the part `ratio` is sent."""
    for case in ((10_000, 0.01, 2), (10_000, 0.05, 4), (1_000, 0.1, 3), (100, 0.001, 2)):
        numel, ratio, world_size = case
        said, read = predict(*case), launch(_sent_by_topk, world_size, numel, ratio, device="cpu")[0]
        if said != read:
            return f"{numel:,} numbers, ratio {ratio}, {world_size} ranks: you say {said:,}, a rank sends {read:,}"
    return None


def _averages(comm, make):
    average, before = make(comm, RATIO), comm.traffic
    found = [average(_gradient(step, comm.rank)) for step in range(STEPS)]
    return found, (comm.traffic - before).total


def _topk(comm):
    topk = paper.TopK(comm, RATIO)
    return _averages(comm, lambda comm, ratio: lambda gradient: topk.average("w", gradient))


@exercise("parity and bytes", callable, process="ranks")
def second(make):
    """Grade `make(comm, ratio)`, which returns a function `average(gradient)`: top-k with error feedback of one flat
    fp32 gradient, its places sent as int32."""
    for world_size in (2, 3):
        expected, right = launch(_topk, world_size, device="cpu")[0]
        for rank, (found, sent) in enumerate(launch(_averages, world_size, make, device="cpu")):
            for step, (ours, its) in enumerate(zip(found, expected, strict=True)):
                if not torch.allclose(ours.flatten(), its, rtol=1e-5, atol=1e-6):
                    hint = ": is what was not sent kept, and added?" if step else ""
                    return f"rank {rank} of {world_size} has another average in step {step}{hint}"
            if sent != right:
                return f"the averages are right, but rank {rank} sent {sent:,} bytes; payloads are {right:,}"
    return None


def _two_levels(comm, reduce, numel):
    intra, inter = levels(comm, 2)
    intra.reset_traffic(), inter.reset_traffic()
    total = reduce(intra, inter, torch.arange(float(numel)) * (comm.rank + 1))
    return total, intra.traffic.total, inter.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def third(reduce):
    """Grade `reduce(intra, inter, x)`, which returns the sum of flat x over all ranks: within machines, then between.
    Each machine has two ranks."""
    for world_size in (4, 8):
        numel = 8 * 100
        expected = torch.arange(float(numel)) * sum(range(1, world_size + 1))
        for rank, (total, intra, inter) in enumerate(launch(_two_levels, world_size, reduce, numel, device="cpu")):
            sent = two_level_traffic(4 * numel, 2, world_size // 2, machine=rank // 2)
            if not torch.allclose(total, expected):
                return f"rank {rank} of {world_size} does not have the sum of all ranks"
            if inter > sent["inter"].total:
                return (f"the sum is right, but rank {rank} of {world_size} sent {inter:,} bytes between machines; "
                        f"{sent['inter'].total:,} are enough")
            if intra > sent["intra"].total:
                return (f"the sum is right, but rank {rank} of {world_size} sent {intra:,} bytes within its "
                        f"machine; {sent['intra'].total:,} are enough")
    return None
