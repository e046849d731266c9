"""The bench of pipelines at a tiny size, and that it would show a version that keeps all micro-batches."""

import pytest
from rank_pool import pooled

from benchmarks import pipeline

TINY = {"vocabulary": 64, "context": 32, "layers": 4, "hidden": 32, "heads": 4}


def test_a_run_reads_times_and_bytes_of_all_schedules(run):
    settings, rows = run(pipeline, TINY, world=2, rounds=2)
    assert settings["ranks"] == 2
    names = [f"{what}, {name}" for what in ("step", "peak of a step") for name in pipeline.PEERS]
    assert [row["what"] for row in rows] == names
    assert all(row["value"] > 0 and row["paired"] > 0 and row["unit"] == "s" for row in rows[:6])
    for row in rows[6:]:
        assert row["unit"] == "MB" and len(row["ranks"]) == 2 and max(row["ranks"]) == round(row["ratio"], 3)


def test_losses_that_differ_end_the_reading():
    peer = pipeline.peer_of("1f1b")
    pipeline.check_losses("1f1b", [1.0, 0.9], peer, [1.0, 0.90001])
    with pytest.raises(RuntimeError, match=r"1f1b has losses .1.0, 0.9., torch.*Schedule1F1B .1.0, 1.0."):
        pipeline.check_losses("1f1b", [1.0, 0.9], peer, [1.0, 1.0])


def test_a_version_that_keeps_all_micro_batches_is_seen():
    few, many = (max(rank["peak"] for rank in pooled(pipeline.bytes_of, 2, "ours", name, TINY))
                 for name in ("1f1b", "gpipe"))
    assert many > 1.3 * few
