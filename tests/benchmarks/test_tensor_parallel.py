"""The bench of tensor parallelism at a tiny size, and that it would show a version that splits nothing."""

import pytest

from benchmarks import tensor_parallel
from refimpl.comm import launch

TINY = {"vocabulary": 64, "context": 16, "layers": 2, "hidden": 64, "heads": 4}


def test_a_run_reads_bytes_and_times_of_both_pairs(run):
    settings, rows = run(tensor_parallel, TINY, world=2, rounds=2)
    assert settings["ranks"] == 2 and [(row["what"].split(", ")[1], row["peer"]) for row in rows] == (
        tensor_parallel.PAIRS * 2)
    states = 12 * settings["parameters"] / 1e6  # of AdamW, on one rank
    for row in rows[:2]:
        assert 0.5 * states < row["value"] < 2 * states and row["unit"] == "MB"
    assert all(row["value"] > 0 and row["paired"] > 0 and row["unit"] == "s" for row in rows[2:])


def test_losses_that_differ_end_the_reading(monkeypatch):
    losses = iter([1.0, 1.0, 1.0, 1.1])
    monkeypatch.setattr(tensor_parallel, "launch", lambda *args, **how: [{"peak": 1, "losses": [next(losses)]}])
    with pytest.raises(RuntimeError, match="SequenceParallel has losses .1.1., tensor_parallel .1.0."):
        list(tensor_parallel.all_rows("cpu", TINY, 2, 2))


def not_split(comm, name):
    if name == "whole":  # the mutant: each rank is a group of its own
        tensor_parallel.TRAINERS["whole"] = lambda model, comm: tensor_parallel.Ours(
            tensor_parallel.tensor_parallel, model, comm.split([comm.rank]))
    return tensor_parallel.bytes_of(comm, name, TINY)


def test_a_version_that_splits_nothing_is_seen():
    split, whole = (max(rank["peak"] for rank in launch(not_split, 2, name)) for name in ("tensor_parallel", "whole"))
    assert whole > 1.5 * split
