"""Exercises of the page *Fewer bytes on the wire*."""

import torch

from refimpl.comm.two_level import levels, two_level_traffic
from refimpl.papers import compression as paper

from . import close, exercise, launch, readable
from .asking import Asked

HINTS = {
    "first": [
        "k = max(1, round(ratio · numel)) numbers are sent. Each has its place beside it.",
        "A number is fp32, a place int32: 8 bytes for both.",
        "In an `all_gather` each rank's payload is sent N - 1 times."],
    "second": [
        "Keep a residual from one call to the next, at first 0. Let x be the gradient and the residual.",
        "`places = x.abs().topk(k).indices` is what this rank sends. The residual is x with zeros there, and nothing "
        "else is ever forgotten.",
        "Gather the places as int32 and x[places]. Add each rank's numbers at its places to zeros, with `index_add_`: "
        "two ranks may send the same place. Divide by N."],
    "third": [
        "Between machines a rank may send only its share: make that share first.",
        "`intra.reduce_scatter(x)` gives each rank of a machine one part of the machine's sum.",
        "`inter.all_reduce` sums this part over machines, `intra.all_gather` puts the parts together."]}

STEPS = 6


def _gradient(step, rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * step + rank))


def _sent_by_topk(comm, numel, ratio):
    paper.TopK(comm, ratio).average("w", _gradient(0, comm.rank, numel))
    return comm.traffic.total


@exercise("bytes", int, process="call")
def first(predict):
    """Grade `predict(numel, ratio, world_size)`, which returns the bytes that each rank sends when top-k averages a
    gradient of `numel` fp32 numbers, of which the part `ratio` is sent, rounded to a whole number, but at least one."""
    for case in ((10_000, 0.01, 2), (10_000, 0.05, 4), (1_078, 0.1, 3), (1_043, 0.01, 2), (100, 0.001, 3)):
        numel, ratio, world_size = case
        said, read = predict(*case), launch(_sent_by_topk, world_size, numel, ratio, device="cpu")[0]
        if said != read:
            return (f"{numel:,} numbers, ratio {ratio}, {world_size} ranks: you say {said:,}, a rank sends {read:,} "
                    f"bytes for {max(1, round(ratio * numel)):,} of the numbers")
    return None


def _averages(comm, make, numel, ratio):
    average, before, found = Asked(make(comm, ratio), torch.Tensor), comm.traffic, []
    for step in range(STEPS):
        mine = average(_gradient(step, comm.rank, numel))
        found.append(mine.clone() if readable(mine) else None)  # a later step may write to it
    return found, (comm.traffic - before).total


def _topk(comm, ratio):
    topk = paper.TopK(comm, ratio)
    return lambda gradient: topk.average("w", gradient)


@exercise("parity and bytes", callable, process="ranks")
def second(make):
    """Grade `make(comm, ratio)`, which returns a function `average(gradient)`: top-k with error feedback of one flat
    fp32 gradient, its places sent as int32."""
    for world_size, numel, ratio in ((2, 4000, 0.01), (3, 1290, 0.03), (2, 300, 0.001)):
        expected, right = launch(_averages, world_size, _topk, numel, ratio, device="cpu")[0]
        case = f"{numel:,} numbers, ratio {ratio}"
        for rank, (found, sent) in enumerate(launch(_averages, world_size, make, numel, ratio, device="cpu")):
            where = f"{case}, rank {rank} of {world_size}"
            for step, (mine, average) in enumerate(zip(found, expected, strict=True)):
                if mine is None or mine.shape != average.shape or mine.dtype != average.dtype:
                    return f"{where}: expected an average in fp32 of shape ({numel},), which can be read"
                if not close(mine, average):
                    hint = ": is what was not sent, and only that, kept and added?" if step else ""
                    return f"{where}: another average in step {step}, in {_other(mine, average)}{hint}"
            if sent != right:
                return f"{where}: the averages are right, but it sent {sent:,} bytes; payloads are {right:,}"
    return None


def _other(mine, expected):
    """Return a text: how many numbers differ."""
    return f"{(~torch.isclose(mine, expected, rtol=1e-4)).sum():,} of {len(mine):,} numbers"


def _part(rank, numel):
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def _two_levels(comm, reduce, ranks_per_machine, numel):
    intra, inter = levels(comm, ranks_per_machine)
    intra.reset_traffic(), inter.reset_traffic()
    total = reduce(intra, inter, _part(comm.rank, numel))
    return total if readable(total) else None, intra.traffic.total, inter.traffic.total


@exercise("parity and bytes", torch.Tensor, process="ranks")
def third(reduce):
    """Grade `reduce(intra, inter, x)`, which returns the sum of flat x over all ranks: within machines, then between.
    Its length is a multiple of the ranks of a machine."""
    for S, machines in ((2, 2), (3, 1), (1, 3)):
        numel, N = S * 101, S * machines
        expected = sum(_part(rank, numel) for rank in range(N))
        for rank, (total, intra, inter) in enumerate(launch(_two_levels, N, reduce, S, numel, device="cpu")):
            sent = two_level_traffic(4 * numel, S, machines, machine=rank // S)
            where = f"{S} rank{'s' * (S > 1)} in a machine, rank {rank} of {N}"
            if total is None or not close(total, expected):
                return f"{where} does not have the sum of all ranks, in fp32 of x's shape"
            if inter > sent["inter"].total:
                return (f"{where}: the sum is right, but it sent {inter:,} bytes between machines; "
                        f"{sent['inter'].total:,} are enough")
            if intra > sent["intra"].total:
                return (f"{where}: the sum is right, but it sent {intra:,} bytes within its machine; "
                        f"{sent['intra'].total:,} are enough")
    return None
