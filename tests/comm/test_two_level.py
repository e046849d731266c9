"""all_reduce on two levels and along a tree: the same sums, bytes by level, and which is best on which links."""

import time

import pytest
import torch
from rank_pool import on_ranks

from refimpl.comm import FakeCommunicator, Link, launch, ring_all_reduce, tree_all_reduce, two_level_all_reduce
from refimpl.comm.hosts.facts import Hosts
from refimpl.comm.traffic import Traffic
from refimpl.comm.tree import tree_seconds, tree_traffic
from refimpl.comm.two_level import levels, ring_seconds, two_level_seconds, two_level_traffic


@pytest.mark.parametrize("numel", [0, 1, 3, 64, 1001])
@pytest.mark.parametrize(("world_size", "S"), [(4, 2), (4, 1), (4, 4), (3, 3), (6, 3), (1, 1)])
@on_ranks("world_size")
def test_sums_and_bytes_of_each_level(comm, world_size, S, numel):
    R, B, (intra, inter) = world_size // S, 8 * numel, levels(comm, S)
    assert (intra.rank, inter.rank) == (comm.rank % S, comm.rank // S)
    first = torch.arange(numel, dtype=torch.float64)
    x, total = first + 1000 * comm.rank, world_size * first + 1000 * sum(range(world_size))
    comm.reset_traffic(), intra.reset_traffic(), inter.reset_traffic()
    assert torch.equal(two_level_all_reduce(intra, inter, x), total)
    expected = two_level_traffic(B, S, R, 8, inter.rank)
    assert intra.traffic == expected["intra"] and inter.traffic == expected["inter"]
    assert comm.traffic == intra.traffic + inter.traffic
    if R > 1 and S > 1 and numel > 60:  # the mutant is one ring over all ranks, all of it between machines
        assert inter.traffic.total < 1.1 * Traffic(all_reduce=2 * B * (R - 1) // R).total / S
    comm.reset_traffic()
    assert torch.equal(tree_all_reduce(comm, x), total)
    assert comm.traffic == Traffic(send=tree_traffic(B, world_size, comm.rank))
    assert torch.allclose(two_level_all_reduce(intra, inter, x, "avg"), total / world_size)
    assert torch.equal(x, first + 1000 * comm.rank)


def test_a_whole_tensor_keeps_its_shape_and_dtype():
    intra, inter = levels(FakeCommunicator(1, 4), 2)
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    assert torch.equal(two_level_all_reduce(intra, inter, x), 4 * x)
    with pytest.raises(ValueError, match="op='max': expected 'sum' or 'avg'"):
        two_level_all_reduce(intra, inter, x, "max")


@pytest.mark.parametrize("S", [0, 3, 2.0])
def test_machines_of_another_size_are_refused(S):
    with pytest.raises(ValueError, match="expected a divisor of 4"):
        levels(FakeCommunicator(0, 4), S)


# --- which is best where ---------------------------------------------------------------------------------------------

FAST, SLOW = Link(200e6, 0.2e-3), Link(20e6, 40e-3)
SETTINGS = {"small, slow between machines": (400, FAST, SLOW, 4, 2, "two levels"),
            "large, slow between machines": (2_000_000, FAST, SLOW, 4, 2, "two levels"),
            "small, all alike": (400, SLOW, SLOW, 8, 4, "tree"),
            "large, all alike": (2_000_000, SLOW, SLOW, 8, 4, "two levels")}


def timed(comm, nbytes, intra_link, inter_link, S, rounds=5):
    """{algorithm: seconds until the last rank has the sum}. The link is a lower bound, to which a busy machine adds:
    the quickest round is the link's."""
    torch.set_num_threads(1)
    intra, inter = levels(comm, S)
    comm.link, intra.link, inter.link = inter_link, intra_link, inter_link
    x, found = torch.ones(nbytes // 4), {}
    ways = {"ring": lambda: comm.all_reduce(x), "tree": lambda: tree_all_reduce(comm, x),
            "two levels": lambda: two_level_all_reduce(intra, inter, x)}
    for name, reduce in ways.items():
        taken = []
        for _ in range(rounds):
            comm.barrier()
            begun = time.perf_counter()
            reduce()
            taken.append(comm.host().all_reduce(torch.tensor(time.perf_counter() - begun), "max").item())
        found[name] = min(taken)
    return found


@pytest.mark.alone
@pytest.mark.parametrize("setting", SETTINGS)
def test_seconds_are_those_of_arithmetic_and_the_best_is_the_best(setting):
    nbytes, intra_link, inter_link, N, S, best = SETTINGS[setting]
    expected = {"ring": ring_seconds(nbytes, N, inter_link), "tree": tree_seconds(nbytes, N, inter_link),
                "two levels": two_level_seconds(nbytes, S, N // S, intra_link, inter_link)}
    found = launch(timed, N, nbytes, intra_link, inter_link, S, timeout=120)[0]
    assert min(found, key=found.get) == min(expected, key=expected.get) == best
    for name, seconds in expected.items():
        assert 0.99 * seconds < found[name] < 1.1 * seconds, (name, found[name], seconds)


def test_the_rings_bytes_are_those_of_two_levels_and_its_steps_are_more():
    ring, two = ring_seconds(8_000_000, 8, SLOW), two_level_seconds(8_000_000, 4, 2, SLOW, SLOW)
    assert two == pytest.approx(ring - (14 - 8) * SLOW.latency)


@on_ranks(3)
def test_tree_and_ring_agree(comm):
    x = torch.arange(10.0) * (comm.rank + 1)
    assert torch.equal(ring_all_reduce(comm, x), tree_all_reduce(comm, x))


@pytest.mark.parametrize(("names", "S"), [("aaaa", 4), ("aabb", 2), ("abbc", 1), ("abab", 1), ("aaabbb", 3)])
def test_levels_follow_the_hosts(names, S):
    comm = FakeCommunicator(0, len(names))
    comm._hosts = Hosts([{"host": name, "address": name} for name in names])
    intra, inter = levels(comm)
    assert (intra.world_size, inter.world_size) == (S, len(names) // S)
    if names == "abbc":
        with pytest.warns(UserWarning, match=r"levels\(comm, 2\): rank 0 \(a\) and rank 1 \(b\) are on .*or give 1"):
            levels(comm, 2)
