"""Sub-groups of any ranks, made in any order, of a sub-group too."""

from collections.abc import Iterable
from numbers import Integral

import torch
import torch.distributed as dist

from ..errors import CollectiveMismatch
from .torch_internals import all_gather_single


def new_group(comm, members):
    """Make torch's process group of `members` (ascending ranks of `comm`); None on a rank that is not one of them.

    All ranks of `comm` call it, each with the members of its own sub-group. CollectiveMismatch if its members differ.
    """
    mine = [_groups_made(), *(rank in members for rank in range(comm.world_size))]
    everyones = torch.empty(comm.world_size * len(mine), dtype=torch.int64)
    all_gather_single(everyones, torch.tensor(mine), group=comm._group)
    everyones = everyones.view(comm.world_size, -1).tolist()
    if comm.rank not in members:
        return None
    for rank in members:
        if everyones[rank][1:] != everyones[comm.rank][1:]:
            theirs = [member for member in range(comm.world_size) if everyones[rank][1 + member]]
            raise CollectiveMismatch(f"split: rank {comm.ranks[comm.rank]} makes a sub-group of ranks {members}, and "
                                     f"rank {comm.ranks[rank]} one of {theirs}", [comm.ranks[rank]])
    return _make(comm, members, max(everyones[rank][0] for rank in members))


def host_group(comm):
    """Make a group of all ranks of `comm` that talks over gloo. They agree on it through torch's store, by no
    collective: those of `comm` may be out of step."""
    _, store = dist.distributed_c10d._world.pg_map[comm._group]
    times = store.add(f"host groups of {comm.rank}", 1)
    store.set(f"host group {times} of {comm.rank}", str(_groups_made()))
    most = max(int(store.get(f"host group {times} of {rank}")) for rank in range(comm.world_size))
    return _make(comm, range(comm.world_size), most, "gloo")


def _make(comm, members, most, backend=None):
    """Make the group on one of its members. `most`: the groups that the member with the most has made."""
    # torch names a group after its ranks and the number of groups that the process has made. Members that have made
    # different numbers would wait for each other under different names forever: so those with fewer catch up.
    while _groups_made() < most:
        dist.new_group([comm.ranks[comm.rank]], use_local_synchronization=True)
    # By default torch would end a wait in a sub-group after half an hour, whatever the world's timeout is.
    timeout = comm._group._get_backend(comm._group._device_types[0]).options._timeout
    from ..hosts.sockets import noted

    with noted():
        return dist.new_group([comm.ranks[rank] for rank in members], timeout, backend, use_local_synchronization=True)


def _groups_made():
    return len(dist.distributed_c10d._world.pg_names)


def check_peer(rank, world_size, name, itself=None):
    """Return `rank` as an int. ValueError naming the argument if it is no rank of the world, or is `itself`."""
    integer = type(rank) is int or isinstance(rank, Integral) and not isinstance(rank, bool)
    if not integer or not 0 <= rank < world_size:
        raise ValueError(f"{name}={rank!r}: expected a rank from 0 to {world_size - 1}")
    if rank == itself:
        raise ValueError(f"{name}={rank}: a rank cannot send to itself")
    return int(rank)


def check_members(ranks, world_size):
    """Return a sub-group's ranks in ascending order. ValueError for none, one twice, or one that does not exist."""
    if not isinstance(ranks, Iterable):
        raise TypeError(f"split({ranks!r}): expected a list of ranks")
    ranks = [check_peer(rank, world_size, "ranks has") for rank in ranks]
    if not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"split({ranks}): expected at least one rank, and each once")
    return sorted(ranks)
