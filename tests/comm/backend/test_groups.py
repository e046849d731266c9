"""Sub-groups: made in any order, overlapping, of sub-groups; and who is named when their members do not agree."""

import torch
from rank_pool import failure, on_ranks

from refimpl.comm import CollectiveMismatch, launch


@on_ranks(4)
def test_sub_groups(comm):
    x = torch.tensor([float(comm.rank)])
    row = comm.split([0, 1] if comm.rank < 2 else [2, 3])
    column = comm.split([comm.rank % 2, comm.rank % 2 + 2])
    assert row.all_gather(x).tolist() == ([0, 1] if comm.rank < 2 else [2, 3])
    assert column.all_gather(x).tolist() == [comm.rank % 2, comm.rank % 2 + 2]
    assert (row.rank, row.world_size, column.rank) == (comm.rank % 2, 2, comm.rank // 2)
    assert row.ranks == ((0, 1) if comm.rank < 2 else (2, 3))
    odd = comm.split([3, 1])
    assert (odd is None) == (comm.rank in (0, 2))
    if odd is not None:
        assert odd.ranks == (1, 3) and odd.rank == comm.rank // 2
        assert odd.broadcast(x, src=1).item() == 3
        alone = odd.split([odd.rank])  # a sub-group of a sub-group
        assert alone.ranks == (comm.rank,) and alone.all_reduce(x).item() == comm.rank
    same_again = comm.split([0, 1] if comm.rank < 2 else [2, 3])
    assert same_again.all_reduce(x).item() == (1 if comm.rank < 2 else 5)
    assert repr(row) == f"Communicator(rank {row.rank} of 2 (world ranks {row.ranks[0]}, {row.ranks[1]}), cpu)"
    broadcast = {"broadcast": 4} if comm.rank == 3 else {}  # rank 1 is the end of the chain 3 -> 1
    assert row.traffic == {"all_gather": 4} and comm.traffic == {"all_gather": 8, "all_reduce": 4, **broadcast}


@on_ranks(4)
def test_groups_that_overlap_and_what_they_send_counts_in_all_above(comm):
    """Ranks that have made different numbers of groups make one together, and one out of two that overlap."""
    low = comm.split([0, 1, 2])
    high = comm.split([1, 2, 3])
    ends = low.split([0, 2]) if low is not None else None
    everyone = comm.split(range(4))
    x = torch.tensor([1.0])
    sums = [group.all_reduce(x).item() if group is not None else None for group in (low, high, ends, everyone)]
    assert sums == [[3, None, 2, 4], [3, 3, None, 4], [3, 3, 2, 4], [None, 3, None, 4]][comm.rank]
    if comm.rank == 0:
        assert ends.traffic["all_reduce"] == 4  # 2(N-1)/N of 4 bytes
        assert low.traffic["all_reduce"] == 4 + 8  # its own, of one element in three chunks: and those of `ends`
        assert comm.traffic["all_reduce"] == 4 + 8 + 8


@on_ranks(2, launch=launch)
def test_a_wait_in_a_sub_group_ends_no_sooner_than_one_in_the_world(comm):
    """The days after which torch itself ends a wait."""
    for group in (comm, comm.split([0, 1]), comm.host()):
        assert group._group._get_backend(torch.device("cpu")).options._timeout.days == 365


def test_sub_groups_that_overlap_are_named():
    failure(r"a sub-group of ranks \[0, 1\], and rank 1 one of \[1, 2\]", lambda comm: comm.split(
        [0, 1] if comm.rank == 0 else [1, 2]) and comm.barrier(), 3, error=CollectiveMismatch)


def test_a_split_that_meets_another_call_is_named_in_debug_mode():
    failure("rank 0 differs in a collective:\n  rank 0: split", lambda comm: comm.all_reduce(
        torch.ones(3)) if comm.rank else comm.split([0, 1]), 3, error=CollectiveMismatch, debug=True)
