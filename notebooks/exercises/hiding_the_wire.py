"""Exercises of the page *Hiding the wire*."""

import itertools
import random

import torch

from refimpl import memory

from . import close, exercise, launch, readable

HINTS = {
    "first": [
        "Collect gradients until the next one would make the bucket larger than `bucket_bytes`. The last bucket may be "
        "smaller.",
        "For a bucket: `flat = torch.cat([g.flatten() for g in bucket])`, `comm.all_reduce(flat, 'avg', out=flat)`.",
        "`flat.split([g.numel() for g in bucket])` gives the means. Copy each into its gradient, and keep no reference "
        "to flat."],
    "second": [
        "Bucket i ends at e_i = max(e_(i-1), ready[i]) + takes[i]. The rank waits for the last end, less the last "
        "`ready`.",
        "Bucket i has a copy from ready[i] on, and no more at e_i.",
        "The most is reached when a copy begins: at each moment ready[i] add up nbytes[j] of all j with ready[j] <= "
        "ready[i] < e_j."]}

SHAPES = [(3 + number % 5, 5 + 4 * (number % 3)) for number in range(80)]  # of gradients


def _gradient(number, rank):
    return torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(100 * number + rank))


def _averaged(comm, average, bucket_bytes):
    """Return (the gradients that `average` left, bytes of each collective's tensor, bytes sent, bytes of buffers)."""
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for number, parameter in enumerate(parameters):
        parameter.grad = _gradient(number, comm.rank)
    run, calls = comm._run, []
    comm._run = lambda collective, x, *args: calls.append(x.nbytes) or run(collective, x, *args)
    with memory.track(parameters, [p.grad for p in parameters]) as t:
        average(comm, parameters, bucket_bytes)
    taken = int(t.timeline.totals.max()) - t.start.total
    found = [p.grad if p.grad is not None and readable(p.grad) else None for p in parameters]
    return found, calls, comm.traffic.total, taken


@exercise("parity and bytes", bool, process="ranks")
def first(average):
    """Grade `average(comm, parameters, bucket_bytes)`, which makes each `.grad` its mean over ranks, by few collectives
    and in small buffers."""
    nbytes = sum(_gradient(number, 0).nbytes for number in range(len(SHAPES)))
    for world_size, bucket_bytes in ((2, 2048), (4, 3000)):
        most, sent = -(-nbytes // bucket_bytes) + 1, 2 * (world_size - 1) * nbytes // world_size
        means = [sum(_gradient(number, rank) for rank in range(world_size)) / world_size
                 for number in range(len(SHAPES))]
        for rank, result in enumerate(launch(_averaged, world_size, average, bucket_bytes, device="cpu")):
            (found, calls, traffic, taken), where = result, f"rank {rank} of {world_size}, buckets of {bucket_bytes:,}"
            for number, (mine, mean) in enumerate(zip(found, means, strict=True)):
                if mine is None or not close(mine, mean):
                    return f"{where}: gradient {number} of {len(SHAPES)} is not the mean over ranks"
            if max(calls) > bucket_bytes:
                return f"{where}: the means are right, but a collective has a tensor of {max(calls):,} bytes"
            if len(calls) > most:
                return (f"{where}: the means are right, by {len(calls)} collectives; {most} buckets hold all "
                        f"{nbytes:,} bytes")
            if taken > 2 * bucket_bytes + 512:
                return (f"{where}: the means are right, but {taken:,} bytes were taken at once: two buckets are "
                        f"{2 * bucket_bytes:,}")
            if not 0.99 * sent <= traffic <= 1.01 * sent:
                return f"{where}: the means are right, but it sent {traffic:,} bytes; 2(N-1)/N of all is {sent:,}"
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


STEADY = [100, 200, 300], [60, 60, 60], [4096] * 3  # each is sent before the next is ready
BUSY = [10, 20, 30, 200], [100, 5, 5, 1], [1000, 2000, 4000, 1000]  # three wait; the wire is free at 120
JUST_SENT = [100, 150, 250], [50, 100, 20], [1000, 2000, 3000]  # a copy is gone when the next begins
ALONE = [0], [7], [1000]


@exercise("time and bytes", (float, int))
def second(predict):
    """Grade `predict(ready, takes, nbytes)`: of buckets that are complete at the moments `ready`, each copied then, and
    sent one after the other, each in `takes` ms; returns (ms that a rank waits after the last moment, most bytes of
    copies at once). A copy is freed when it is sent, and then another may begin."""
    for ready, takes, nbytes in (STEADY, BUSY, JUST_SENT, ALONE, *map(_buckets, range(1, 8))):
        said, right = predict(list(ready), list(takes), list(nbytes)), _on_the_wire(ready, takes, nbytes)
        asked = f"ready at {ready} ms, sent in {takes} ms, of {nbytes} bytes"
        if said[0] != right[0]:
            return f"{asked}: you say that a rank waits {said[0]} ms, it is {right[0]} ms"
        if said[1] != right[1]:
            return f"{asked}: the time is right; you say {said[1]:,} bytes at most, it is {right[1]:,}"
    return None
