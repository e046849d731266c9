"""Exercises of the page *Ranks and collectives*."""

import torch

from refimpl import memory
from refimpl.comm import FakeCommunicator

from . import exercise, launch

NBYTES = 4 * 24  # 24 fp32 numbers: 2, 3 and 4 ranks divide them


@exercise("bytes", int)
def first(predict):
    """Grade `predict(collective, nbytes, world_size)`, which returns the bytes that one rank sends. `nbytes` is the
    size of the full tensor."""
    for world_size in (2, 3, 4):
        comm = FakeCommunicator(0, world_size)
        full, part = torch.zeros(NBYTES // 4), torch.zeros(NBYTES // 4 // world_size)
        for collective, x in (("all_reduce", full), ("reduce_scatter", full), ("all_gather", part),
                              ("all_to_all", full)):
            before = comm.traffic
            getattr(comm, collective)(x)
            sent = (comm.traffic - before)[collective]
            said = predict(collective, NBYTES, world_size)
            if said != sent:
                return f"{collective} of {NBYTES} bytes on {world_size} ranks: you say {said}, a rank sends {sent}"
    return None


def _on_ranks(comm, function):
    """Return (what `function(comm, x)` returned, the sum over ranks, bytes sent, bytes of buffers) of this rank."""
    x = torch.arange(24.0) * 10**comm.rank
    expected = torch.arange(24.0) * sum(10**rank for rank in range(comm.world_size))
    with memory.track(x) as t:
        said = function(comm, x)
    taken = t.timeline.totals.max() - t.start.total
    return said, expected, comm.traffic, int(taken)


@exercise("parity and bytes", torch.Tensor, process="ranks")
def second(my_reduce_scatter):
    """Grade `my_reduce_scatter(comm, x)`, which returns chunk r of the sum over ranks, on rank r. It may call only
    `comm.send_recv`."""
    for world_size in (2, 4):
        results = launch(_on_ranks, world_size, my_reduce_scatter, device="cpu")
        for rank, (said, expected, traffic, _) in enumerate(results):
            right = expected.chunk(world_size)[rank]
            if not isinstance(said, torch.Tensor) or said.shape != right.shape or not torch.equal(said, right):
                return f"rank {rank} of {world_size} should have {right.tolist()}, you return {said}"
            wanted = NBYTES - NBYTES // world_size
            if dict(traffic) != {"send": wanted}:
                return (f"the chunks are right, but rank {rank} of {world_size} sent {dict(traffic)}; "
                        f"(N-1)/N of the tensor is {wanted} bytes, all by send_recv")
    return None


@exercise("parity and bytes", torch.Tensor, process="ranks")
def third(sum_in_place):
    """Grade `sum_in_place(comm, x)`, which leaves the sum over ranks in x and returns x. It allocates no buffer."""
    for rank, (said, expected, traffic, taken) in enumerate(launch(_on_ranks, 2, sum_in_place, device="cpu")):
        if not isinstance(said, torch.Tensor) or not torch.equal(said, expected):
            return f"rank {rank} should return {expected.tolist()}, you return {said}"
        if taken:
            return f"the sum is right, but {taken} bytes were taken besides x"
        if traffic.total != NBYTES:
            return f"the sum is right, but a rank sent {traffic.total} bytes; 2(N-1)/N of the tensor is {NBYTES}"
    return None
