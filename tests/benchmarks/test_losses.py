"""The bench of losses at a tiny size: each method learns, differs from the whole, and has parameters of its own."""

import dataclasses

from benchmarks import losses
from refimpl.model import GPT

TINY = dataclasses.replace(losses.CONFIG, context_length=128, layers=2, hidden=32, heads=2, kv_heads=2,
                           mlp_hidden=None)


def test_each_method_learns(run):
    settings, rows = run(losses, TINY, 30, (0, 1))
    assert settings["parameters"] == TINY.parameter_count() and settings["steps"] == 30
    assert [row["method"] for row in rows] == list(losses.methods())
    assert rows[0]["ratio"] == 1 and len({row["value"] for row in rows}) == len(rows)
    assert all(2 < row["value"] < 5.2 and len(row["by_seed"]) == 2 for row in rows)  # ln 256 = 5.55


def test_the_model_has_about_5_million_parameters():
    assert 4.5e6 < losses.CONFIG.parameter_count() < 5.5e6


def test_layers_do_not_share_gates():
    model = GPT(TINY)
    before = sum(p.numel() for p in model.parameters())
    losses.methods(TINY)["gated delta rule"](model)
    assert sum(p.numel() for p in model.parameters()) == before + 2 * (2 * 2 * 16 + 2 * 2)
