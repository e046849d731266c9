"""The bench of activations at a tiny size, and that it would show a way that saves nothing."""

from contextlib import nullcontext

import pytest

from benchmarks import activations
from benchmarks.meter import Size

TINY = Size(layers=2, hidden=64, heads=4, vocab_size=64, batch=2, sequence=64)


def test_a_run_reads_time_peak_kept_bytes_gradients_and_a_curve(run):
    settings, rows = run(activations, TINY, rounds=2, steps=20)
    assert settings["step"]["hidden"] == 64
    by_what = {row["what"]: row for row in rows}
    for way in activations.WAYS:
        assert by_what[f"time: {way}, fp32, dropout 0.0"]["value"] > 0
        for dropout in (0.0, 0.1):
            kept = by_what[f"kept: {way}, fp32, dropout {dropout}"]
            assert kept["ratio"] < 1
            assert by_what[f"predicted: {way}, fp32, dropout {dropout}"]["ratio"] == 1
        assert by_what[f"loss after 20 steps: {way}"]["ratio"] == pytest.approx(1, abs=0.02)
        assert len(by_what[f"loss after 20 steps: {way}"]["curve"]) == 2
    assert by_what["loss after 20 steps: lossless"]["ratio"] == 1
    assert 0 < abs(by_what[f"loss after 20 steps: {activations.YARDSTICK}"]["ratio"] - 1) < 0.01
    assert by_what["gradient's error: lossless"]["value"] == 0
    assert 0 < by_what["gradient's error: bf16"]["value"] < 0.05
    assert by_what["kept: int8, fp32, dropout 0.0"]["ratio"] < 0.35
    assert by_what["kept: torch.utils.checkpoint, fp32, dropout 0.0"]["ratio"] < 0.35
    offload = [row for row in rows if "offload" in row["what"] and row["unit"] == "bytes"]
    assert len(offload) == 4 and all(row["ratio"] == 1 for row in offload), "on a CPU nothing moves, in either way"


def test_a_way_that_saves_nothing_is_seen(monkeypatch):
    monkeypatch.setattr(activations, "compress_activations", lambda model, **options: nullcontext())
    rows = list(activations.compression_rows(TINY, "fp32", 0.0, "cpu", rounds=2))
    assert all(row["ratio"] == 1 for row in rows if row["what"].startswith("kept: int8"))
    assert all(row["ratio"] < 0.5 for row in rows if row["what"].startswith("predicted: int8"))
