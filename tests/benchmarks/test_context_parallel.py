"""The bench of context parallelism at a tiny size, and that it would show a version that splits nothing."""

import os
from unittest import mock

import pytest
from rank_pool import pooled

from benchmarks import context_parallel

TINY = {"vocab_size": 61, "context_length": 64, "layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2,
        "positions": "rotary"}


def in_tiles(comm, function, *args):
    """In PyTorch, as on a machine without a GPU: kernels in Triton's interpreter take a minute."""
    with mock.patch.dict(os.environ, TRITON_INTERPRET="0"):
        return function(comm, *args)


def test_a_run_reads_bytes_and_times_of_all_methods(monkeypatch):
    monkeypatch.setattr(context_parallel, "launch", lambda fn, N, *args, **how: pooled(in_tiles, N, fn, *args))
    settings, rows = context_parallel.run("cpu", TINY, world=2, rounds=2)
    rows = list(rows)
    assert settings["ranks"] == 2
    assert [row["what"] for row in rows] == [f"{what}, {method}" for what in ("peak of a step", "step")
                                             for method in context_parallel.METHODS]
    assert all(row["value"] > 0 and row["peer"] == context_parallel.WHOLE for row in rows)
    assert all(row["ratio"] < 0.9 for row in rows if row["unit"] == "MB")


def test_losses_that_differ_end_the_reading(monkeypatch):
    losses = iter([1.0, 1.0, 1.1])
    monkeypatch.setattr(context_parallel, "launch", lambda *args, **how: [{"peak": 1, "losses": [next(losses)]}])
    with pytest.raises(RuntimeError, match="ring, plain has losses .1.1., the whole sequence on one device .1.0."):
        list(context_parallel.all_rows("cpu", TINY, 2, 2))


def test_a_version_that_splits_nothing_is_seen():
    split, whole = (max(rank["peak"] for rank in pooled(in_tiles, 2, context_parallel.bytes_of, method, TINY))
                    for method in ("ring, zig-zag", context_parallel.WHOLE))
    assert whole > 1.3 * split
