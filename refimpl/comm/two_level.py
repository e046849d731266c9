"""all_reduce on two levels: in each machine over fast links, between machines over slow ones, a part of the bytes.

    machine 0    r0  r1  r2  r3         `intra`: a row, the S ranks of one machine
    machine 1    r4  r5  r6  r7         `inter`: a column, those with the same place in each of R machines

    reduce_scatter in a row       (S−1)/S · B          rank s gets the machine's sum of part s
    all_reduce in a column       2(R−1)/R · B/S        the sum of all machines
    all_gather in a row           (S−1)/S · B          the other parts

So a rank sends S times less between machines than in one ring over all ranks, whose slowest link sets the pace, and
with fewer steps. Its sum is that of a ring, in another order. As hybrid sharding reduces gradients. "Massively
distributed SGD" (Mikami et al. 2018), section 3.2, and NCCL's and Horovod's hierarchical all_reduce.
"""

from typing import TYPE_CHECKING

from torch.nn import functional as F

from .traffic import Traffic, ring_traffic

if TYPE_CHECKING:
    import torch

    from .communicator import Communicator


def levels(comm, ranks_per_machine=None):
    """Split `comm` in two levels; return (intra, inter). All ranks call it; machine i has ranks S·i … S·i + S − 1.

    S = `ranks_per_machine` is by default the most that `comm.hosts` allows: every row on one host. Warns where rows
    cross hosts. ValueError if S does not divide the number of ranks.
    """
    S, N = ranks_per_machine, comm.world_size
    if S is None:
        S = ranks_in_a_row(comm)
    if not isinstance(S, int) or S < 1 or N % S:
        raise ValueError(f"ranks_per_machine={S!r} of {N} ranks: expected a divisor of {N}")
    if comm.rank == 0:
        comm.hosts.warn_of_crossing(f"levels(comm, {S})", [comm.ranks[first:first + S] for first in range(0, N, S)],
                                    f"leave ranks_per_machine out, or give {ranks_in_a_row(comm)}")
    first = comm.rank // S * S
    return comm.split(range(first, first + S)), comm.split(range(comm.rank % S, N, S))


def ranks_in_a_row(comm):
    """Return the most ranks that a row can have, if all rows have as many, follow each other, and each is on one host.
    """
    N = comm.world_size
    return next(S for S in range(N, 0, -1) if N % S == 0 and not any(
        len(comm.hosts.groups(comm.ranks[first:first + S])) > 1 for first in range(0, N, S)))


def two_level_all_reduce(intra: "Communicator", inter: "Communicator", x: "torch.Tensor",
                         op: str = "sum") -> "torch.Tensor":
    """Return x reduced over all ranks of both levels, by "sum" or "avg", as a new tensor of x's shape.

    ValueError for another op, of which two levels may give another result.
    """
    if op not in ("sum", "avg"):
        raise ValueError(f"op={op!r}: expected 'sum' or 'avg'")
    flat = F.pad(x.detach().reshape(-1), (0, -x.numel() % intra.world_size))  # a reduce_scatter has equal chunks
    shard = intra.reduce_scatter(flat, op)
    shard = inter.all_reduce(shard, op, out=shard)
    return intra.all_gather(shard)[: x.numel()].view(x.shape)


def two_level_traffic(nbytes, ranks_per_machine, machines, itemsize=4, machine=0):
    """Return {"intra", "inter": Traffic} of a rank of this `machine`, for a tensor of `nbytes`; padding counts."""
    S, R = ranks_per_machine, machines
    shard = -(-(nbytes // itemsize) // S) * itemsize
    row = ring_traffic("all_gather", S * shard, S)
    return {"intra": Traffic(reduce_scatter=row, all_gather=row),
            "inter": Traffic(all_reduce=ring_traffic("all_reduce", shard, R, machine, itemsize))}


def two_level_seconds(nbytes, ranks_per_machine, machines, intra_link, inter_link, itemsize=4):
    """Return how long it takes if each level has a `Link` of its own: its three parts, one after the other."""
    sent = [two_level_traffic(nbytes, ranks_per_machine, machines, itemsize, machine) for machine in range(machines)]
    row = sent[0]["intra"]["all_gather"]
    return (intra_link.seconds("reduce_scatter", row, ranks_per_machine)
            + inter_link.seconds("all_reduce", max(each["inter"].total for each in sent), machines)
            + intra_link.seconds("all_gather", row, ranks_per_machine))


def ring_seconds(nbytes, world_size, link, itemsize=4):
    """Return how long one ring over all ranks takes, whose links are all as the slowest: `link`."""
    sent = max(ring_traffic("all_reduce", nbytes, world_size, rank, itemsize) for rank in range(world_size))
    return link.seconds("all_reduce", sent, world_size)
