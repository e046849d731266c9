"""The bench of the gated delta rule at a tiny size; and that it shows a rule that is wrong, or takes more bytes."""

import pytest

from benchmarks import linear
from refimpl.papers import linear_attention as paper

pytest.importorskip("transformers")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(linear, "HEADS", 2)


def test_each_pass_is_read_beside_each_peer(run, small):
    settings, rows = run(linear, 128, 2)
    assert settings["shape"]["tokens"] == 128
    read = {(row["what"], row["peer"]): row for row in rows}
    for peer in (linear.TRANSFORMERS, linear.FLASH):
        assert all(read[what, peer]["value"] > 0 for what in ("forward", "forward and backward", "peak"))
    assert read["peak", "closed form"]["ratio"] == 1
    assert read["state", "keys and values of a token, bf16"]["ratio"] == 64  # a head's 64 · 64 · 4 of 2 · 64 · 2 bytes


def test_a_rule_that_is_wrong_and_one_that_takes_more_are_seen(run, small, monkeypatch):
    def parallel(q, k, v, log_decay, beta, **options):
        return paper.parallel(q / 8, k, v, log_decay, beta)

    monkeypatch.setattr(linear, "gated_delta_rule", parallel)
    assert next(row["ratio"] for row in run(linear, 256, 2)[1] if row["peer"] == "closed form") > 1.5
    monkeypatch.setattr(linear, "gated_delta_rule", lambda *given, **options: 2 * parallel(*given))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run(linear, 128, 2)
