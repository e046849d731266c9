"""The bench of heads and MLPs at a tiny size, and that it would show a head that saves nothing."""

import torch

from benchmarks import cross_entropy

TINY = cross_entropy.Size(256, 997, 16, 64, "swiglu")
MANY = cross_entropy.Size(600, 997, 16, 0, "")  # of more tokens than a chunk


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


def test_bytes_are_the_closed_forms_and_far_below_the_peers():
    rows = {row["what"]: row for row in cross_entropy.losses_rows("cpu", MANY, 2, torch.float32)}
    names = "3 losses of a head, chunked, float32", "a split head, 2 ranks, chunked, float32"
    assert set(rows) == {f"{which} of {name}" for which in ("peak", "step") for name in names}
    for name, saved in zip(names, (2 * 997 * 16 * 4, 600 * 499 * 6), strict=True):
        peak, step = rows[f"peak of {name}"], rows[f"step of {name}"]
        assert abs(peak["value"] - peak["predicted"]) < 4096 and peak["peer_value"] - peak["value"] > saved - 64
        assert step["paired"] > 0 and abs(step.get("loss_apart", 0)) < 1e-5


def test_a_gradient_of_the_weight_for_each_loss_is_seen(monkeypatch):
    def apart(hiddens, weight, targets):
        return [sum(map(cross_entropy.chunked_linear_cross_entropy, hiddens, [weight] * 3, targets))]

    monkeypatch.setattr(cross_entropy, "multi_token_cross_entropy", apart)
    peak, _ = cross_entropy.several_rows("cpu", MANY, 2, torch.float32)
    assert peak["value"] - peak["predicted"] > 2 * 997 * 16 * 4 - 64
