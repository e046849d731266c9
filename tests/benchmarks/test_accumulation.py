"""The bench of accumulation at a tiny size, and that it would show a loop that saves nothing."""

from benchmarks import accumulation
from benchmarks.meter import Size

TINY = Size(layers=1, hidden=32, heads=2, vocab_size=64, batch=16, sequence=16)


def test_a_run_reads_peaks_and_times(run):
    settings, rows = run(accumulation, size=TINY, rounds=2)
    assert settings["step"]["batch"] == accumulation.ROWS and settings["micro-batches"] == [1, 2, 4, 8, 16]
    peaks = [row for row in rows if row["unit"] == "bytes" and row["peer"] == accumulation.WHOLE]
    assert len(peaks) == 2 * 4
    for row in peaks:
        assert 0 < row["predicted"] < 1.05 * row["value"]
    fp32 = [row["value"] for row in peaks if row["what"].endswith("fp32")]
    assert fp32 == sorted(fp32, reverse=True) and fp32[2] < 0.5 * peaks[0]["peer_value"]
    times = [row for row in rows if row["unit"] == "s"]
    assert len(times) == 2 * 5 * 2 and all(row["value"] > 0 and row["spread"] >= 0 for row in times)
    assert {row["peer"] for row in rows} == {accumulation.WHOLE, accumulation.PLAIN}


def test_a_loop_that_keeps_its_losses_is_seen(monkeypatch):
    def losses_kept(model, tokens, targets, micro_batch):
        sum(model(part, part) * micro_batch / len(tokens) for part in tokens.split(micro_batch)).backward()

    monkeypatch.setattr(accumulation, "accumulate", losses_kept)
    steps = accumulation.Steps(TINY, accumulation.DTYPES["fp32"], "cpu")
    rows = list(accumulation.byte_rows(steps, "fp32", accumulation.DTYPES["fp32"], "cpu"))
    assert all(row["ratio"] > 1.3 for row in rows if row["peer"] == accumulation.PLAIN and "16" in row["what"])
