"""The bench of sequences at a tiny size, and that it would show a version that saves nothing."""

from benchmarks import sequences
from benchmarks.meter import Size

TINY = Size(layers=1, hidden=32, heads=2, vocab_size=64, batch=1, sequence=256)


def test_a_run_reads_peaks_and_times(run):
    settings, rows = run(sequences, size=TINY, rounds=2)
    assert settings["step"]["sequence"] == 256 and settings["chunks"] == [2, 4, 8, 16]
    peaks = [row for row in rows if row["unit"] == "bytes"]
    assert len(peaks) == 2 * 4 and {row["peer"] for row in rows} == {sequences.WHOLE}
    for row in peaks[:4]:
        assert abs(row["predicted"] / row["value"] - 1) < 0.01
    assert [row["value"] for row in peaks[:4]] == sorted((row["value"] for row in peaks[:4]), reverse=True)
    assert peaks[2]["ratio"] < 0.3
    times = [row for row in rows if row["unit"] == "s"]
    assert len(times) == 2 * 5 and all(row["value"] > 0 and row["spread"] >= 0 for row in times)


def test_chunks_that_save_nothing_are_seen(monkeypatch):
    monkeypatch.setattr(sequences, "ChunkedSequenceProcessor", lambda model, length, gradient: model)
    steps = sequences.Steps(TINY, sequences.DTYPES["fp32"], device="cpu")
    for row in sequences.byte_rows(steps, "fp32", sequences.DTYPES["fp32"], "cpu"):
        assert row["ratio"] == 1 and row["predicted"] < 0.7 * row["value"]
