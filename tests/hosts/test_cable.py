"""What goes over the cable between hosts: counted at the interface."""

import pytest
from hosts_kit import Hosts, missing

from refimpl.comm.backend.by_host import cable_bytes

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

MOVE = """
import os, time
import torch
from refimpl.comm import launch
from refimpl.comm.two_level import levels, two_level_all_reduce

N, kind, later = int(os.environ["WORLD_SIZE"]), os.environ["KIND"], os.environ["LATER"] == "1"

def fn(comm):
    n = 2**20 // N // 4 * 4
    whole = torch.arange(n * N, dtype=torch.float64).remainder_(1000)
    if kind == "all_gather":
        call, expected = lambda: comm.all_gather(whole.chunk(N)[comm.rank], async_op=later), whole
    elif kind == "reduce_scatter":
        weights = sum(range(1, N + 1))
        call = lambda: comm.reduce_scatter(whole * (comm.rank + 1), async_op=later)
        expected = whole.chunk(N)[comm.rank] * weights
    else:
        pair = levels(comm)
        call = lambda: two_level_all_reduce(*pair, whole)
        expected = whole * N
    for _ in range(2):
        found = call()
        assert torch.equal(found.wait() if later else found, expected)
    comm.barrier()
    print("ready", flush=True)
    time.sleep(1)
    handles = [call() for _ in range(4)]
    for handle in reversed(handles):
        assert torch.equal(handle.wait() if later else handle, expected)
    comm.barrier()
    print("moved", n * N * 8, flush=True)
    time.sleep(1)
launch(fn, N)
"""


@pytest.mark.parametrize("ranks", [(1, 2, 1), (3, 1), (4, 4), (2, 2)], ids=str)
@pytest.mark.parametrize(("kind", "later"), [("levels", 0), ("all_gather", 0), ("all_gather", 1),
                                             ("reduce_scatter", 0), ("reduce_scatter", 1)])
def test_a_chunk_goes_once_to_each_host(tmp_path, ranks, kind, later):
    names = ("hosta", "hostb", "hostc")[:len(ranks)]
    with Hosts(tmp_path / "h", *names) as hosts:
        run = hosts.run(MOVE, ranks, "forked", KIND=kind, LATER=str(later))
        run.heard("ready", sum(ranks))
        before = {name: hosts.sent(name) for name in names}
        run.heard("moved", sum(ranks))
        sent = {name: hosts.sent(name) - before[name] for name in names}
        B = int(run.lines["hosta"][-1][1].split()[1])
        done = run.wait(10)
    assert {each.code for each in done.values()} == {0}, run.text
    N, R = sum(ranks), len(ranks)
    for name, S in zip(names, ranks, strict=True):
        share = 2 * (R - 1) / R if kind == "levels" else cable_bytes(kind, B, S, N, R) / B
        print(f"{name}: {sent[name] / 4 / B:.3f} B, expected {share:.3f}")
        if kind != "levels" or len(set(ranks)) == 1:  # where hosts have other numbers, a row is one rank
            assert share < sent[name] / 4 / B < 1.06 * share + 0.01
