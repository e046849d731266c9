"""all_reduce by hand against the library's: the same sums, and to the byte the same traffic."""

import pytest
import torch
from rank_pool import pooled

from refimpl import memory
from refimpl.comm import FakeCommunicator, ring_all_reduce, ring_traffic

SIZES = [0, 1, 2, 3, 7, 8, 24, 1000, 1003]


def against_the_library(comm):
    N, r = comm.world_size, comm.rank
    for n in SIZES:
        for dtype in (torch.int64, torch.int32, torch.float32, torch.bfloat16):
            x = torch.arange(n).mul(r + 1).remainder(50).to(dtype)
            before = comm.traffic
            total = ring_all_reduce(comm, x)
            sent = (comm.traffic - before)["send"]
            assert torch.equal(total, comm.all_reduce(x)), (n, dtype)
            assert torch.equal(x, torch.arange(n).mul(r + 1).remainder(50).to(dtype)), "the argument was changed"
            assert sent == ring_traffic("all_reduce", x.nbytes, N, rank=r, itemsize=x.element_size()), (n, dtype)
            if n % N == 0:
                assert sent * N == 2 * (N - 1) * x.nbytes
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(r)).t()
    ours, theirs = ring_all_reduce(comm, x), comm.all_reduce(x)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs)
    if N <= 2:  # a sum of two does not depend on its order
        assert torch.equal(ours, theirs)
    return ours


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_ring_sums_as_the_library_does_and_sends_what_the_formula_says(world_size):
    everyones = pooled(against_the_library, world_size)
    assert all(torch.equal(total, everyones[0]) for total in everyones)  # every rank has the same bits


def forgets_the_second_round(comm, x):
    """A ring that only reduces and scatters."""
    class Stops(Exception):
        pass

    class Halfway(type(comm)):
        steps = 0

        def send_recv(self, *args, **how):
            if self.steps == self.world_size - 1:
                raise Stops
            self.steps += 1
            return super().send_recv(*args, **how)

    halfway = Halfway(comm.rank, comm.world_size, group=comm._group, parent=comm)
    try:
        ring_all_reduce(halfway, x)
    except Stops:
        pass
    return comm.traffic["send"]


def test_half_a_ring_sends_half():
    n = 12
    for sent in pooled(forgets_the_second_round, 3, torch.ones(n)):
        assert sent * 2 == ring_traffic("all_reduce", 4 * n, 3, itemsize=4)


def test_a_dry_run_of_the_ring_counts_the_same():
    for rank in range(4):
        comm = FakeCommunicator(rank, 4)
        ring_all_reduce(comm, torch.ones(10))
        assert comm.traffic == {"send": ring_traffic("all_reduce", 40, 4, rank=rank, itemsize=4)}
    t = memory.dry_run(ring_all_reduce, FakeCommunicator(0, 4), torch.ones(10**6))
    assert t.peak["communication"] == 10**6  # one chunk at a time
