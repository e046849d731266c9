"""Rows of several losses of one head and of a split head, and that as many calls would show."""

import torch

from benchmarks import cross_entropy, cross_entropy_losses

TINY = cross_entropy.Size(600, 997, 16, 0, "")  # of more tokens than a chunk


def test_bytes_are_the_closed_forms_and_far_below_the_peers():
    rows = {row["what"]: row for row in cross_entropy_losses.all_rows("cpu", TINY, 2, torch.float32)}
    names = "3 losses of a head, chunked, float32", "a split head, 2 ranks, chunked, float32"
    assert set(rows) == {f"{which} of {name}" for which in ("peak", "step") for name in names}
    for name, saved in zip(names, (2 * 997 * 16 * 4, 600 * 499 * 6), strict=True):
        peak, step = rows[f"peak of {name}"], rows[f"step of {name}"]
        assert abs(peak["value"] - peak["predicted"]) < 4096 and peak["peer_value"] - peak["value"] > saved - 64
        assert step["paired"] > 0 and abs(step.get("loss_apart", 0)) < 1e-5


def test_a_gradient_of_the_weight_for_each_loss_is_seen(monkeypatch):
    def apart(hiddens, weight, targets):
        return [sum(map(cross_entropy_losses.chunked_linear_cross_entropy, hiddens, [weight] * 3, targets))]

    monkeypatch.setattr(cross_entropy_losses, "multi_token_cross_entropy", apart)
    peak, _ = cross_entropy_losses.several_rows("cpu", TINY, 2, torch.float32)
    assert peak["value"] - peak["predicted"] > 2 * 997 * 16 * 4 - 64
