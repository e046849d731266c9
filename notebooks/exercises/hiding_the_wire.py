"""Exercises of the page *Hiding the wire*."""

import itertools
import random

import torch

from refimpl import memory

from . import exercise, launch


def _averaged(comm, average, sizes, bucket_bytes):
    """Return (the gradients that `average` left, the means, collectives, bytes sent, bytes of buffers)."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(number * comm.world_size + comm.rank))
    middle = (comm.world_size - 1) / 2
    expected = [torch.full_like(p, number * comm.world_size + middle) for number, p in enumerate(parameters)]
    run, calls = comm._run, []
    comm._run = lambda collective, *args: calls.append(collective) or run(collective, *args)
    with memory.track(parameters, [p.grad for p in parameters]) as t:
        average(comm, parameters, bucket_bytes)
    taken = int(t.timeline.totals.max()) - t.start.total
    found = [None if p.grad is None else p.grad.clone() for p in parameters]
    return found, expected, len(calls), comm.traffic.total, taken


@exercise("parity and bytes", process="ranks")
def first(average):
    """Grade `average(comm, parameters, bucket_bytes)`, which makes each `.grad` its mean over ranks, by few collectives
    and in small buffers."""
    sizes = [64 * (1 + number % 3) for number in range(30)]
    nbytes, bucket_bytes = 4 * sum(sizes), 4096
    for world_size in (2, 4):
        most, sent = -(-nbytes // bucket_bytes) + 1, 2 * (world_size - 1) * nbytes // world_size
        for rank, result in enumerate(launch(_averaged, world_size, average, sizes, bucket_bytes, device="cpu")):
            found, expected, calls, traffic, taken = result
            for number, (mine, mean) in enumerate(zip(found, expected, strict=True)):
                if mine is None or mine.shape != mean.shape or not torch.allclose(mine, mean):
                    return f"gradient {number} on rank {rank} of {world_size} is not the mean over ranks"
            if calls > most:
                return f"the means are right, by {calls} collectives; {most} buckets hold all {nbytes:,} bytes"
            if taken > 2 * bucket_bytes + 1024:
                return f"the means are right, but {taken:,} bytes were taken: two buckets are {2 * bucket_bytes:,}"
            if not 0.99 * sent <= traffic <= 1.01 * sent:
                return f"the means are right, but a rank sent {traffic:,} bytes; 2(N-1)/N of all is {sent:,}"
    return None


def _buckets(seed):
    """Return (moments, durations, bytes) of some buckets, in milliseconds."""
    dice = random.Random(seed)
    moments = list(itertools.accumulate(dice.randrange(10, 60) for _ in range(3 + seed)))
    return moments, [dice.randrange(5, 90) for _ in moments], [dice.randrange(1, 9) << 20 for _ in moments]


def _on_the_wire(ready, takes, nbytes):
    """Return (milliseconds waited after the last bucket is ready, most bytes that wait or are sent at one moment)."""
    ends = list(itertools.accumulate(zip(ready, takes, strict=True), lambda end, own: max(end, own[0]) + own[1],
                                     initial=0))[1:]
    most = max(sum(size for begin, end, size in zip(ready, ends, nbytes, strict=True) if begin <= now < end)
               for now in ready)
    return ends[-1] - ready[-1], most


@exercise("bytes", (float, int))
def second(predict):
    """Grade `predict(ready, takes, nbytes)`: of buckets that are complete at the moments `ready`, each copied then, and
    sent one after the other, each in `takes` ms; returns (ms that a rank waits after the last moment, most bytes of
    copies at once). A copy is freed when it is sent."""
    steady = [100, 200, 300], [60, 60, 60], [4096] * 3
    for ready, takes, nbytes in (steady, *map(_buckets, range(1, 8))):
        said, right = predict(list(ready), list(takes), list(nbytes)), _on_the_wire(ready, takes, nbytes)
        asked = f"ready at {ready} ms, sent in {takes} ms, of {nbytes} bytes"
        if not isinstance(said, (tuple, list)) or len(said) != 2:
            return f"expected a pair, the milliseconds waited and the most bytes; you say {said!r}"
        if said[0] != right[0]:
            return f"{asked}: you say that a rank waits {said[0]} ms, it is {right[0]} ms"
        if said[1] != right[1]:
            return f"{asked}: the time is right; you say {said[1]:,} bytes at most, it is {right[1]:,}"
    return None
