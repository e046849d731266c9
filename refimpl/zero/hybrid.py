"""Hybrid sharding: states are cut among a few ranks with fast links, and groups of such ranks hold the same.

    shards →      0   1   2   3         a row is a group that cuts the states: S ranks, as on one machine
    replica 0    r0  r1  r2  r3         a column holds the same shard: R ranks, as on R machines
    replica 1    r4  r5  r6  r7

    reduce_scatter in a row       (S−1)/S · Ψ          the fast links: gradients become shards, summed over S ranks
    all_reduce in a column       2(R−1)/R · Ψ/S        the slow links: the shard, summed over all N = S · R ranks
    all_gather in a row           (S−1)/S · Ψ          the fast links: parameters, as before

So a rank sends S times less between replicas than data parallelism, and stage 3 gathers nothing from another replica.
The price is memory: states take 1/S each, and not 1/N. "PyTorch FSDP" (Zhao et al. 2023), section 3.2.2; "MiCS" (Zhang
et al. 2022), section 3. The all_reduce of one bucket runs beside the backward of the next.
"""

import itertools
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..comm import Communicator


class Levels(NamedTuple):
    """The two levels of data parallelism on `comm`; without hybrid sharding `shards` is `comm`, and `replicas` None."""

    comm: Communicator
    shards: Communicator
    replicas: Communicator | None = None

    @property
    def parts(self):
        """Return the communicators of a part of the ranks."""
        return () if self.replicas is None else (self.shards, self.replicas)


def levels_of(comm, shards, replicas, stage):
    """Return the Levels of an engine. All ranks of `comm` call it.

    TypeError for one level alone, what is no Communicator, and stage 0, which has no shards. ValueError on all ranks
    unless the groups are the rows and the columns of a grid.
    """
    if shards is None and replicas is None:
        return Levels(comm, comm)
    for name, given in (("shards", shards), ("replicas", replicas)):
        if not isinstance(given, Communicator):
            raise TypeError(f"{name}={given!r}: expected both levels of comm, shards=mesh.get_parallel_group('shards') "
                            "and replicas=mesh.get_parallel_group('replicas'), or neither")
    if not stage:
        raise TypeError("shards and replicas: DataParallel cuts nothing, and all of its ranks are replicas; use Zero1, "
                        "Zero2 or Zero3")
    mine = [1 + group.ranks.index(rank) if rank in group.ranks else 0 for group in (shards, replicas)
            for rank in comm.ranks]
    mine += [shards.world_size, replicas.world_size]
    gathered = comm.host().all_gather(torch.tensor([mine]), label="the levels")
    # in a dry run there are no values, and nobody else, to compare
    if not isinstance(gathered, FakeTensor) and comm.has_others and not _is_grid(gathered.tolist()):
        raise ValueError(f"shards={shards!r} and replicas={replicas!r} of {comm!r}: expected groups that are the rows "
                         "and the columns of a grid of all ranks, as Mesh(dp=8, shards=4).connect(comm) makes them")
    return Levels(comm, shards, replicas)


def _is_grid(gathered):
    """Tell whether each place (shards.rank, replicas.rank) is one rank's, and groups are rows and columns of places."""
    N, (S, R) = len(gathered), gathered[0][-2:]
    places = [(row[i] - 1, row[N + i] - 1) for i, row in enumerate(gathered)]
    return sorted(places) == list(itertools.product(range(S), range(R))) and all(
        row == [*((s + 1) * (r == mine[1]) for s, r in places), *((r + 1) * (s == mine[0]) for s, r in places), S, R]
        for row, mine in zip(gathered, places, strict=True))


class AcrossReplicas:
    """The reduction of one bucket over both levels: a Handle whose second collective begins after the first.

    Every rank calls `launch_across` at the same place of its program: so the order of collectives is the same on all.
    """

    def __init__(self, within, replicas, label):
        self._within, self._replicas, self._label, self._across = within, replicas, label, None

    def launch_across(self):
        """Wait for the reduce_scatter within the group of shards; launch the all_reduce of the shard."""
        if self._across is None:
            shard, self._within = self._within.wait(), None
            # in place: the shard of this group's sum is not needed by itself
            self._across = self._replicas.all_reduce(shard, "avg", out=shard, async_op=True, label=self._label)

    def wait(self):
        """Return this rank's shard of the average over all ranks."""
        self.launch_across()
        return self._across.wait()


def holders(specs, world, replicas):
    """Return {name: all ranks that hold the same shard, as numbers in `world`}. All ranks call it. Each replica adds
    itself, or the ranks that the parameter's spec names: tensor parallelism leaves some parameters whole on all."""
    mine = torch.zeros(len(specs), world.world_size, dtype=torch.uint8)
    for row, spec in zip(mine, specs.values(), strict=True):
        row[list(spec.replicas or (world.rank,))] = 1
    found = replicas.host().all_reduce(mine, "max", label="who holds the same")
    if isinstance(found, FakeTensor):  # a dry run has no values
        return {}
    return {name: tuple(row.nonzero().view(-1).tolist()) for name, row in zip(specs, found, strict=True)}
