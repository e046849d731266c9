"""all_reduce by hand against the library's: the same sums, and to the byte the same traffic."""

import pytest
import torch
from rank_pool import on_ranks

from refimpl import memory
from refimpl.comm import FakeCommunicator, ring_all_reduce, ring_traffic


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@on_ranks("world_size")
def test_the_ring_sums_as_the_library_does_and_sends_what_the_formula_says(comm, world_size):
    N, r = world_size, comm.rank
    for n in (0, 1, 2, 3, 7, 8, 24, 1000, 1003):
        for dtype in (torch.int64, torch.int32, torch.float32, torch.bfloat16):
            x, before = torch.arange(n).mul(r + 1).remainder(50).to(dtype), comm.traffic
            total = ring_all_reduce(comm, x)
            sent = (comm.traffic - before)["send"]
            assert torch.equal(total, comm.all_reduce(x)), (n, dtype)
            assert torch.equal(x, torch.arange(n).mul(r + 1).remainder(50).to(dtype)), "the argument was changed"
            assert sent == ring_traffic("all_reduce", x.nbytes, N, rank=r, itemsize=x.element_size()), (n, dtype)
            assert n % N or sent * N == 2 * (N - 1) * x.nbytes
    x = torch.randn(3, 50, generator=torch.Generator().manual_seed(r)).t()
    ours, theirs = ring_all_reduce(comm, x), comm.all_reduce(x)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs)
    assert N > 2 or torch.equal(ours, theirs)  # a sum of two does not depend on its order
    assert all(torch.equal(each, ours) for each in comm.all_gather(ours[None]))  # every rank has the same bits


@on_ranks(3)
def test_half_a_ring_sends_half(comm):
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

    with pytest.raises(Stops):
        ring_all_reduce(Halfway(comm.rank, comm.world_size, group=comm._group, parent=comm), torch.ones(12))
    assert comm.traffic["send"] * 2 == ring_traffic("all_reduce", 4 * 12, 3, itemsize=4)


def test_a_dry_run_of_the_ring_counts_the_same():
    for rank in range(4):
        comm = FakeCommunicator(rank, 4)
        ring_all_reduce(comm, torch.ones(10))
        assert comm.traffic == {"send": ring_traffic("all_reduce", 40, 4, rank=rank, itemsize=4)}
    t = memory.dry_run(ring_all_reduce, FakeCommunicator(0, 4), torch.ones(10**6))
    assert t.peak["communication"] == 10**6  # one chunk at a time
