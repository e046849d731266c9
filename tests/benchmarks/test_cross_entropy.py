"""The bench of heads and MLPs at a tiny size, and that it would show a head that saves nothing."""

import torch

from benchmarks import cross_entropy

TINY = cross_entropy.Size(256, 997, 16, 64, "swiglu")


def test_a_run_reads_peaks_times_and_errors(run):
    settings, rows = run(cross_entropy, size=TINY, rounds=2)
    assert settings["size"]["vocabulary"] == 997 and settings["dtypes"] == ["float32", "bfloat16"]
    heads = [row for row in rows if row["what"].startswith("peak of a head")]
    assert len(heads) == 4
    for row in heads:
        assert 0.9 * row["predicted"] <= row["value"] <= 1.05 * row["predicted"] + 4096
    steps = [row for row in rows if row["unit"] == "s"]
    assert len(steps) == 2 * 2 + 3 + 2 and all(row["paired"] > 0 for row in steps)
    errors = [row for row in rows if "error" in row["what"] and "chunked" in row["what"]]
    assert len(errors) == 2 and all(0 < row["ratio"] <= 1.02 for row in errors)
    kept = [row for row in rows if row["what"].startswith("kept of an MLP")]
    assert len(kept) == 3 and all(0 <= row["value"] - row["predicted"] < 512 for row in kept)
    assert kept[2]["value"] < kept[1]["value"] < kept[0]["value"]


def test_a_head_that_keeps_its_logits_is_seen(monkeypatch):
    monkeypatch.setattr(cross_entropy, "chunked_linear_cross_entropy", cross_entropy.plain)
    given = cross_entropy.inputs("cpu", TINY, torch.float32)
    *_, row = cross_entropy.byte_rows(cross_entropy.heads("cpu"), given, TINY, torch.float32, "cpu")
    assert row["value"] > 2 * row["predicted"]
