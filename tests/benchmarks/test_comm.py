"""The bench of ranks and collectives at a tiny size, and that it would show a collective that is slow."""

import statistics
import time

from benchmarks import comm
from refimpl.comm import Communicator


def test_a_run_reads_latency_and_rates():
    settings, rows = comm.run("cpu", sizes=(1024, 4096), worlds=(2,), seconds=0.02, launches=3, least_calls=15)
    rows = list(rows)
    assert settings["tensors on"] == {"2": "cpu"} and settings["sizes"] == [1024, 4096]
    launch, *rates = rows
    assert launch["unit"] == "s" and 0 < launch["value"] < launch["first_call"] + 5 and launch["peer_value"] == 0.5
    assert len(rates) == 3 * len(comm.COLLECTIVES)
    for row in rates:
        if row["unit"] == "B/s":
            assert row["value"] > 0 and row["peer_value"] > 0 and row["calls"] >= 15 and row["paired"] > 0
        else:
            assert row["peer_value"] == comm.LEAST_RATE and row["value"] > 0  # what it is held to is read by the bench


def test_a_collective_that_is_slow_is_seen():
    class Slow(Communicator):
        def all_reduce(self, x, op="sum", **how):
            time.sleep(0.03)  # also where a busy machine makes each call wait its turn for milliseconds
            return super().all_reduce(x, op, **how)

    def in_a_rank(real, seconds):
        slow = Slow(real.rank, real.world_size, group=real._group)
        return comm.rates(slow, "all_reduce", (1024,), seconds, least_calls=15)

    seconds = comm.slowest(comm.launch(in_a_rank, 2, 0.1))[1024]
    row = comm.rate_row("all_reduce", 2, 1024, seconds)
    assert row["ratio"] < 0.5 and row["paired"] < 0.5
    assert statistics.median(seconds[comm.OURS]) > 0.03
