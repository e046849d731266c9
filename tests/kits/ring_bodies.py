"""What the ranks of comm/paper.py are asked. They are forks, so this runs in a process without threads: as a program
that prints {name: "" or how it failed}."""

import functools
import json
import sys
import traceback
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F
from zero_kit import ADAMW

from refimpl.comm import Communicator, ring_all_reduce, ring_traffic
from refimpl.model import GPT, GPTConfig
from refimpl.papers import collectives as paper
from refimpl.papers.zero import Zero

SIZES = (0, 12, 24, 1200)  # elements: 1, 2, 3 and 4 ranks divide them
CONFIG = GPTConfig(vocab_size=64, context_length=16, layers=2, hidden=32, heads=4, tied=False)


def communicator(ring):
    """The package's own, over the same connections."""
    return Communicator(ring.rank, ring.world_size, group=dist.group.WORLD)


def own(rank, n, dtype):
    """A rank's x."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return x.to(dtype) if dtype.is_floating_point else (100 * x).to(dtype)


def against_the_hardened(ring):
    comm, N = communicator(ring), ring.world_size
    for n in SIZES:
        for dtype in (torch.int64, torch.float64, torch.float32):
            x, before, already = own(ring.rank, n, dtype), comm.traffic, ring.sent
            total = ring.all_reduce(x)
            sent, expected = ring.sent - already, ring_all_reduce(comm, x)
            assert sent == (comm.traffic - before)["send"] == 2 * (N - 1) * x.nbytes // N
            assert sent == ring_traffic("all_reduce", x.nbytes, N, ring.rank, x.itemsize)
            assert torch.equal(x, own(ring.rank, n, dtype)), "the argument was changed"
            assert_same(total, expected, N)
            assert_same(total, comm.all_reduce(x), N)
            already = ring.sent
            assert_same(ring.reduce_scatter(x), comm.reduce_scatter(x), N)
            assert ring.sent - already == ring_traffic("reduce_scatter", x.nbytes, N)
            already, rows = ring.sent, x.view(n // 2, 2)
            gathered = ring.all_gather(rows)
            assert torch.equal(gathered, comm.all_gather(rows))
            assert ring.sent - already == ring_traffic("all_gather", gathered.nbytes, N)
            out = torch.empty_like(gathered)
            assert ring.all_gather(rows, out=out) is out and torch.equal(out, gathered)
    return total


def assert_same(a, b, N):
    """To the bit; but three floats and more are added in another order: here the sum of chunk c begins at rank c + 1,
    in `ring_all_reduce` at rank c, in gloo's and in reduce_scatter elsewhere."""
    if N <= 2 or not a.is_floating_point():
        assert torch.equal(a, b)
    else:
        bound = 1e-12 if a.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def check_ring(world_size):
    torch.nn.Linear(300, 300)(torch.randn(300, 300)).sum().backward()  # threads that a fork does not have
    totals = paper.launch(against_the_hardened, world_size)
    assert len(totals) == world_size and all(torch.equal(total, totals[0]) for total in totals)
    expected = sum(own(rank, SIZES[-1], torch.float64) for rank in range(world_size))
    torch.testing.assert_close(totals[0].double(), expected, rtol=1e-5, atol=1e-5)


class SendsAll(paper.Ring):
    """The mutant: whole tensors go around."""

    def all_reduce(self, x):
        total, passing = x.clone(), x
        for _ in range(self.world_size - 1):
            passing = self.pass_on(passing)
            total += passing
        return total


def check_mutant():
    with mock.patch.object(paper, "Ring", SendsAll), pytest.raises(AssertionError):
        fails_in_a_rank(3)


def fails_in_a_rank(world_size):
    for error in paper.launch(caught, world_size):
        assert error is None, error


def caught(ring):
    try:
        x = torch.ones(12)
        assert torch.equal(ring.all_reduce(x), 3 * x)
        assert ring.sent == ring_traffic("all_reduce", x.nbytes, ring.world_size, ring.rank, x.itemsize)
    except AssertionError as error:
        return str(error)


def check_launch():
    assert paper.launch(lambda ring, *args: (ring.rank, args), 3, "a", 1) == [(rank, ("a", 1)) for rank in range(3)]
    fails_in_a_rank(3)


def trained(ring, stage, through):
    """Losses of three steps on `through(ring)`, and the bytes sent."""
    comm = through(ring)
    torch.manual_seed(0)
    model = GPT(CONFIG, dtype=torch.float64)
    zero = Zero([model.embedding, model.positions, *model.blocks, model.norm, model.head], comm, ADAMW, stage)
    losses, already = [], ring.sent
    for step in range(3):
        tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
        mine = tokens.chunk(comm.world_size)[comm.rank]
        loss = F.cross_entropy(model(mine).flatten(0, 1), mine.flatten())
        loss.backward()
        zero.step()
        losses.append(loss.item())
    return losses, (ring.sent - already) or comm.traffic.total


def check_zero(stage):
    """The two papers together: ZeRO on the ring is ZeRO on the package's communicator."""
    ours, theirs = (paper.launch(functools.partial(trained, stage=stage, through=through), 2)
                    for through in (lambda ring: ring, communicator))
    assert ours == theirs and ours[0][1] > 0


TASKS = {
    "launch": check_launch, "a ring that sends whole tensors": check_mutant,
    **{f"ZeRO stage {stage} on it": functools.partial(check_zero, stage) for stage in range(4)},
    **{f"a ring of {N}": functools.partial(check_ring, N) for N in (1, 2, 3, 4)}}


def outcome(task):
    try:
        task()
    except BaseException:  # all of it is told to the test
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    print(json.dumps({name: outcome(TASKS[name]) for name in sys.argv[1:]}))
