"""The bench of mixed precision at a tiny size, and that it would show a region that is slow or keeps too much."""

import time

import pytest
import torch

from benchmarks import precision
from benchmarks.meter import SMALL
from refimpl.mixed_precision.internals.autocast_regions import AutocastRegion


def test_a_run_reads_time_and_bytes_of_every_recipe(run):
    settings, rows = run(precision, size=SMALL, rounds=5)
    assert settings["step"]["hidden"] == 32 and settings["rounds"] == 5
    step, peak, *recipes = rows
    assert step["unit"] == "s" and step["value"] > 0 and step["paired"] > 0 and step["limit"] == 1.10
    assert peak["unit"] == "bytes" and peak["ratio"] <= peak["limit"] == 1.00
    assert len(recipes) == 9
    by_name = {row["what"]: row for row in recipes}
    assert by_name["model states of bf16 autocast"]["ratio"] == 1  # 16 bytes a parameter, and 16
    assert by_name["model states of bf16 weights, fp32 masters"]["ratio"] == 1
    more = by_name["model states of bf16 weights, fp32 masters and gradients"]
    assert more["ratio"] == pytest.approx(18 / 16, abs=1e-2)
    assert all(row["peer_items"]["activations"] > row["items"]["activations"] for row in recipes if "items" in row)


def test_a_region_that_keeps_too_much_is_seen(monkeypatch):
    kept = []

    def cast(self, x, dtype):
        if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype is not dtype:
            kept.append(x.to(dtype))
            return kept[-1]
        return x

    monkeypatch.setattr(AutocastRegion, "cast", cast)
    _, peak = precision.beside_torch(SMALL, "cpu", torch.bfloat16, 2)
    assert peak["ratio"] > peak["limit"]


def test_a_region_that_is_slow_is_seen(monkeypatch):
    original = AutocastRegion.cast

    def cast(self, x, dtype):
        time.sleep(1e-3)
        return original(self, x, dtype)

    monkeypatch.setattr(AutocastRegion, "cast", cast)
    step, _ = precision.beside_torch(SMALL, "cpu", torch.bfloat16, 3)
    assert step["ratio"] > step["limit"] and step["paired"] > step["limit"]
