"""all_reduce on two levels and along a tree: the same sums, bytes by level, and which is best on which links."""

import time

import pytest
import torch

from refimpl.comm import FakeCommunicator, Link, launch, ring_all_reduce, tree_all_reduce, two_level_all_reduce
from refimpl.comm.traffic import Traffic
from refimpl.comm.tree import tree_seconds, tree_traffic
from refimpl.comm.two_level import levels, ring_seconds, two_level_seconds, two_level_traffic


def sums(comm, numel, S):
    intra, inter = levels(comm, S)
    x = torch.arange(numel, dtype=torch.float64) + 1000 * comm.rank
    given, results, sent = x.clone(), [], []
    for reduce in (lambda: two_level_all_reduce(intra, inter, x), lambda: tree_all_reduce(comm, x)):
        comm.reset_traffic(), intra.reset_traffic(), inter.reset_traffic()
        results.append(reduce())
        sent.append([dict(each.traffic) for each in (comm, intra, inter)])
    average = two_level_all_reduce(intra, inter, x, "avg")
    assert torch.equal(x, given)
    return results, average, sent, (intra.rank, inter.rank)


@pytest.mark.parametrize("numel", [0, 1, 3, 64, 1001])
@pytest.mark.parametrize(("world_size", "S"), [(4, 2), (4, 1), (4, 4), (3, 3), (6, 3), (1, 1)])
def test_sums_and_bytes_of_each_level(world_size, S, numel):
    R, B = world_size // S, 8 * numel
    total = world_size * torch.arange(numel, dtype=torch.float64) + 1000 * sum(range(world_size))
    for rank, (results, average, sent, (s, r)) in enumerate(launch(sums, world_size, numel, S)):
        assert all(torch.equal(each, total) for each in results) and torch.allclose(average, total / world_size)
        assert (s, r) == (rank % S, rank // S)
        expected = two_level_traffic(B, S, R, 8, r)
        (whole, intra, inter), (tree, *_) = [[Traffic(each) for each in of] for of in sent]
        assert intra == expected["intra"] and inter == expected["inter"] and whole == intra + inter
        assert tree == Traffic(send=tree_traffic(B, world_size, rank))
        if R > 1 and S > 1 and numel > 60:  # the mutant is one ring over all ranks, all of it between machines
            assert inter.total < 1.1 * Traffic(all_reduce=2 * B * (R - 1) // R).total / S


def test_a_whole_tensor_keeps_its_shape_and_dtype():
    comm = FakeCommunicator(1, 4)
    intra, inter = levels(comm, 2)
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
EVEN = Link(20e6, 40e-3)
SETTINGS = {"small, slow between machines": (400, FAST, SLOW, 4, 2), "large, slow between machines":
            (2_000_000, FAST, SLOW, 4, 2), "small, all alike": (400, EVEN, EVEN, 8, 4),
            "large, all alike": (2_000_000, EVEN, EVEN, 8, 4)}
BEST = {"small, slow between machines": "two levels", "large, slow between machines": "two levels",
        "small, all alike": "tree", "large, all alike": "two levels"}


def predicted(nbytes, intra_link, inter_link, N, S):
    return {"ring": ring_seconds(nbytes, N, inter_link), "tree": tree_seconds(nbytes, N, inter_link),
            "two levels": two_level_seconds(nbytes, S, N // S, intra_link, inter_link)}


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
    nbytes, intra_link, inter_link, N, S = SETTINGS[setting]
    expected = predicted(nbytes, intra_link, inter_link, N, S)
    found = launch(timed, N, nbytes, intra_link, inter_link, S, timeout=120)[0]
    assert min(found, key=found.get) == min(expected, key=expected.get) == BEST[setting]
    for name, seconds in expected.items():
        assert 0.99 * seconds < found[name] < 1.1 * seconds, (name, found[name], seconds)


def test_the_rings_bytes_are_those_of_two_levels_and_its_steps_are_more():
    ring, two = (ring_seconds(8_000_000, 8, EVEN), two_level_seconds(8_000_000, 4, 2, EVEN, EVEN))
    assert two == pytest.approx(ring - (14 - 8) * EVEN.latency)


def by_hand(comm):
    x = torch.arange(10.0) * (comm.rank + 1)
    return torch.equal(ring_all_reduce(comm, x), tree_all_reduce(comm, x))


def test_tree_and_ring_agree():
    assert all(launch(by_hand, 3))
