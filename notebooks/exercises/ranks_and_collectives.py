"""Exercises of the page *Ranks and collectives*."""

import torch

from refimpl import memory
from refimpl.comm import FakeCommunicator

from . import close, exercise, launch

HINTS = {
    "first": [
        "Cut the full tensor into N chunks. The ring of the page passes them on, one chunk a step.",
        "all_gather, reduce_scatter and all_to_all take N - 1 steps. all_reduce is two of them, one after the other.",
        "One step sends nbytes / N. Multiply by N - 1, and by 2 for all_reduce alone."],
    "second": [
        "The first N - 1 steps of the page's ring leave on rank r the sum of chunk r + 1. You want chunk r there.",
        "Begin with another chunk: the sum that ends on rank r has to begin on rank r + 1.",
        "In step s = 0, 1, ... rank r gives chunk r - 1 - s and takes chunk r - 2 - s, both modulo N, and adds its own "
        "part to it."],
    "third": [
        "A collective returns a new tensor, unless you tell it where to write.",
        "Every collective of `comm` has an argument `out`. It may be the tensor that you give.",
        "`comm.all_reduce(x, out=x)` writes the sum into x, and returns x."]}

SHAPE = 12, 5  # 2, 3 and 4 ranks divide 12


@exercise("bytes", float)
def first(predict):
    """Grade `predict(collective, nbytes, world_size)`, which returns the bytes that one rank sends in an "all_reduce",
    "reduce_scatter", "all_gather" or "all_to_all". `nbytes` is the size of the full tensor."""
    for world_size, numbers in ((2, 24), (3, 24), (4, 120), (8, 4096), (1, 24)):
        full, part = torch.zeros(numbers), torch.zeros(numbers // world_size)
        for collective, x in (("all_reduce", full), ("reduce_scatter", full), ("all_gather", part),
                              ("all_to_all", full)):
            comm = FakeCommunicator(0, world_size)
            getattr(comm, collective)(x)
            said, sent = predict(collective, full.nbytes, world_size), comm.traffic.total
            if not abs(said - sent) < 1e-6 * full.nbytes:  # a float may be off by its rounding
                return (f"{collective} of {full.nbytes:,} bytes on {world_size} rank{'s' * (world_size != 1)}: you say "
                        f"{said:,}, a rank sends {sent:,}")
    return None


def _part(rank):
    """Return the tensor of one rank."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def _reduced(comm, answer):
    """Return what is wrong with a reduce_scatter on this rank, or None."""
    N, r, x = comm.world_size, comm.rank, _part(comm.rank)
    chunks = sum(map(_part, range(N))).chunk(N)
    with memory.track(x) as t:
        said = answer(comm, x)
    stays, wanted = t.now.total - t.start.total, (N - 1) * chunks[r].nbytes
    if not close(said, chunks[r]):
        other = next((f"chunk {c} of it" for c in range(N) if close(said, chunks[c])), "other numbers")
        other = other if said.shape == chunks[r].shape else f"a tensor of shape {tuple(said.shape)}"
        return f"rank {r} of {N} should have chunk {r} of the sum, {tuple(chunks[r].shape)} in fp32; you return {other}"
    if not torch.equal(x, _part(r)):
        return f"rank {r} of {N} has the right chunk, but x is not what it was: add into a tensor of your own"
    if dict(comm.traffic) != {"send": wanted}:
        return (f"the chunks are right, but rank {r} of {N} sent {dict(comm.traffic)}; (N-1)/N of the tensor is "
                f"{wanted} bytes, all by send_recv")
    if stays > chunks[r].nbytes:
        return (f"the chunks are right, but {stays} bytes stay on rank {r} of {N}; a chunk is {chunks[r].nbytes}. A "
                "view of a larger tensor keeps all of it")
    return None


@exercise("parity and bytes", torch.Tensor, process="ranks")
def second(my_reduce_scatter):
    """Grade `my_reduce_scatter(comm, x)`, which returns chunk r (along dim 0) of the sum over ranks, on rank r, and
    leaves x as it is. It sends by `comm.send_recv` alone, and keeps nothing but the chunk."""
    return next((wrong for N in (2, 3, 4) for wrong in launch(_reduced, N, my_reduce_scatter, device="cpu") if wrong),
                None)


def _summed(comm, answer):
    """Return what is wrong with a sum in place on this rank, or None."""
    N, r, x = comm.world_size, comm.rank, _part(comm.rank)
    expected = sum(map(_part, range(N)))
    with memory.track(x) as t:
        said = answer(comm, x)
    taken, sent, wanted = t.peak.total - t.start.total, comm.traffic.total, 2 * (N - 1) * expected.nbytes // N
    for name, tensor in (("the tensor that you return", said), ("x", x)):
        if not close(tensor, expected):
            mean = " but their mean" if close(tensor, expected / N) else " but what it was" * close(tensor, _part(r))
            return f"on rank {r} of {N} {name} is not the sum over ranks{mean}"
    if taken:
        return f"the sum is right, but {taken} bytes were taken besides x"
    if sent != wanted:
        return (f"the sum is right, but `comm` of rank {r} of {N} counts {sent} bytes; 2(N-1)/N of the tensor is "
                f"{wanted}, by collectives of `comm`")
    return None


@exercise("parity and bytes", torch.Tensor, process="ranks")
def third(sum_in_place):
    """Grade `sum_in_place(comm, x)`, which leaves the sum over ranks in x and returns x. It allocates no buffer."""
    return next((wrong for N in (2, 4) for wrong in launch(_summed, N, sum_in_place, device="cpu") if wrong), None)
