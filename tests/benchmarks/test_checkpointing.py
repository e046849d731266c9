"""The bench of recomputation at a tiny size, and that it would show a policy that saves nothing."""

from benchmarks import checkpointing
from benchmarks.meter import Size

TINY = Size(layers=2, hidden=32, heads=4, vocab_size=64, batch=2, sequence=64)


def test_a_run_reads_time_and_peak_beside_torch(run):
    settings, rows = run(checkpointing, TINY, rounds=2)
    assert settings["step"]["hidden"] == 32
    by_peer = {peer: [r for r in rows if r["peer"] == peer] for peer in {r["peer"] for r in rows}}
    assert len(by_peer[checkpointing.TORCH]) == 12
    for row in by_peer[checkpointing.TORCH]:
        assert row["value"] > 0 and row["peer_value"] > 0
        assert row["unit"] == "s" or row["ratio"] <= 1.001, row
    for row in by_peer["no recomputation"]:
        assert row["unit"] == "s" or row["ratio"] < 1
    for row in by_peer["allocator"]:
        assert 0.98 < row["ratio"] < 1.02, row


def test_a_policy_that_recomputes_nothing_is_seen():
    plain = checkpointing.Step(TINY)
    idle = checkpointing.with_policy(checkpointing.Step(TINY), [0, 1], None)
    assert idle.peak() == plain.peak()
    assert checkpointing.with_policy(checkpointing.Step(TINY), [(0,), (1,)], None).peak() < plain.peak()
