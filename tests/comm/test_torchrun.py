"""The same call in a world that torchrun made: nothing is started, every worker gets every result."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from refimpl.comm import RankError, launch
from refimpl.comm.collective_order import Order
from refimpl.comm.hang_diagnosis import pages
from refimpl.comm.hosts.facts import Hosts
from refimpl.comm.torchrun import _local_rank, raise_for
from refimpl.ranks.signs import RECORD

ROOT = Path(__file__).resolve().parents[2]


def torchrun(tmp_path, code, processes=2):
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(code))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes),
               "--log-dir", tmp_path, path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_every_worker_gets_every_result_and_one_that_raises_is_named(tmp_path):
    done = torchrun(tmp_path, """
        import os
        import psutil
        import torch
        from refimpl.comm import launch, ring_all_reduce

        def fn(comm, offset):
            total = ring_all_reduce(comm, torch.tensor([comm.rank + offset]))
            pair = comm.split([0, 1])
            return comm.rank, total.item(), pair.all_gather(torch.tensor(comm.rank)).tolist(), comm.traffic.total
        world = int(os.environ["WORLD_SIZE"])
        results = launch(fn, world, 10)
        assert results == [(0, 21, [0, 1], 16), (1, 21, [0, 1], 16)], results
        assert launch(lambda comm: comm.rank, world) == [0, 1]  # again, in the same world
        made, = {f(2) for f in launch(lambda comm: (lambda n: n + 1) if comm.rank else (lambda n: n + 1), world)}
        assert made == 3  # what travels between processes is what `launch` lets travel, and no more
        assert not psutil.Process().children()
        try:
            launch(fn, 3, 1)
        except ValueError as error:
            assert "world_size=3, but torchrun made a world of 2" in str(error)
            print("refused", flush=True)

        def broken(comm):
            if comm.rank == 1:
                raise ValueError("on purpose")
            comm.barrier()
        launch(broken, world)
        print("not reached")
    """)
    assert done.stdout.count("refused") == 2, done.stderr
    assert done.returncode != 0 and "not reached" not in done.stdout  # torchrun has ended rank 0
    assert "RankError: rank 1 raised ValueError: on purpose" in done.stderr


def test_a_collective_that_takes_too_long_tells_what_its_rank_began(tmp_path):
    done = torchrun(tmp_path, """
        import time
        import torch
        from refimpl.comm import launch

        def fn(comm):
            comm.all_reduce(torch.ones(3), label="gradients")
            if comm.rank == 1:
                time.sleep(60)
                return
            comm.all_gather(torch.ones(2), label="blocks.0")
        launch(fn, 2, timeout=6)
    """)
    assert done.returncode != 0
    assert ("RankError: no rank computed or ended a collective for 6 s: rank 1 has been outside of collectives for "
            in done.stderr)
    assert "s; rank 0 waits in all_gather of blocks.0, (2,) float32 (#2)" in done.stderr
    assert "where rank 1 was:" in done.stderr and "time.sleep(60)" in done.stderr
    assert "rank 0 raised RuntimeError: " in done.stderr
    told = done.stderr[done.stderr.index("the last collectives that this rank began with ranks 0 and 1 (2 in all):"):]
    assert [line.split("]:")[-1].strip() for line in told.splitlines()[1:4]] == [
        "#1 all_reduce of gradients, (3,) float32, op sum", "#2 all_gather of blocks.0, (2,) float32",
        "it waited in #2"]


def test_half_of_what_torchrun_sets_is_no_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("RANK", raising=False)
    assert launch(lambda comm: comm.world_size, 2) == [2, 2]


def test_the_world_sizes_have_to_agree(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="world_size=2, but torchrun made a world of 4"):
        launch(print, 2)


class Watch:
    """Of the other ranks nobody knows anything."""

    hosts, verdict, interrupted, told = Hosts([{"host": "a", "address": "a"}] * 2), None, False, None

    def error(self, began):
        return None

    def failed(self, failure):
        self.told = failure


def test_a_connection_that_broke_and_nobody_knows_why_tells_what_its_rank_began():
    record, watch = bytearray(RECORD), Watch()
    Order(pages(record)[0]).name(5, "ranks 0 and 1").begin("all_gather", (2,), torch.float32, None, None, "b")
    with pytest.raises(RankError) as caught:
        try:
            exec(compile("raise RuntimeError('Connection closed\\nby peer')", dist.distributed_c10d.__file__, "exec"))
        except RuntimeError as error:
            raise_for(error, watch, 1, record)
    first, *lines = str(caught.value).splitlines()
    assert (first, lines[0]) == ("rank 1 raised RuntimeError: Connection closed", "by peer")
    assert lines[1:] == ["the last collectives that this rank began with ranks 0 and 1 (1 in all):",
                         "  #1 all_gather of b, (2,) float32"]
    assert watch.told.consequence and watch.told.ranks == [1] and caught.value.ranks == (1,)


def test_an_error_of_its_own_is_that_alone():
    watch = Watch()
    with pytest.raises(RankError) as caught:
        raise_for(ValueError("on purpose"), watch, 0, bytearray(RECORD))
    assert str(caught.value) == watch.told.text == "rank 0 raised ValueError: on purpose"
    assert not watch.told.consequence and isinstance(caught.value.__cause__, ValueError)


def test_ranks_on_gpus_have_to_know_which(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="RANK=1 is set and LOCAL_RANK is not, so no rank knows its GPU"):
        _local_rank(1, ["cuda:0", "cuda:1"])
    assert _local_rank(1, ["cpu", "cpu"]) == _local_rank(1, ["cuda:0"]) == 0
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert _local_rank(5, ["cuda:0", "cuda:1"]) == 1
