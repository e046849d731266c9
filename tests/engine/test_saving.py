"""Saved under one mesh and loaded under another, with another pipeline cut: bit-equal, and training goes on alike."""

import pytest
import torch
from safetensors.torch import load_model
from together_kit import GPTS, built, exchanged

from refimpl.comm import launch

THREE = ({"tp": 2, "pp": 2, "dp": 2}, {"micro_batches": 2, "recompute": True})
OTHERS = [({"pp": 4, "dp": 2}, {"micro_batches": 4, "style": "uniform"}), ({"cp": 2, "tp": 2, "dp": 2}, {"zero": 3}),
          ({"pp": 2, "tp": 2, "dp": 2}, {"micro_batches": 4, "schedule": "interleaved", "zero": 0})]


@pytest.mark.parametrize("name", ["gpt", "tied llama"])
def test_any_mesh_loads_what_any_other_has_saved(name, tmp_path):
    (unequal, losses, saved), *others = launch(exchanged, 8, name, [THREE, *OTHERS], tmp_path)
    assert unequal == [[]] * len(OTHERS)
    for found in losses:
        for ours, theirs in zip(found, losses[0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
    model = built(name, seed=7)
    if name in GPTS:
        load_model(model, tmp_path / "model.safetensors")
    else:
        model.config.save_pretrained(tmp_path)
        model = type(model).from_pretrained(tmp_path)
    loaded = model.state_dict()
    assert loaded.keys() == saved["model"].keys()
    assert all(torch.equal(loaded[key], x) for key, x in saved["model"].items())
