"""Saved under one mesh and loaded under another, with another pipeline cut: bit-equal, and training goes on alike."""

import pytest
import torch
from own_disks_kit import on_hosts
from safetensors.torch import load_model
from together_kit import GPTS, built, differing, engine_of, exchanged, run

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


def apart(comm, folder):
    """Saved by two hosts, each on its own disk, and loaded under another mesh by four: what differs, and losses."""
    first, other = ({"tp": 2, "dp": 2}, {"zero": 3}), ({"pp": 2, "dp": 2}, {"micro_batches": 2})
    with on_hosts(comm, 2, folder) as disk:
        engine = engine_of(comm, "gpt", first[0], **first[1])
        run(engine, 2)
        engine.save(disk, shared=False)
    saved, losses = engine.engine.state_dict(), [run(engine, 1, 2)]
    for (axes, options), per_host in ((first, 2), (other, 1)):
        with on_hosts(comm, per_host, folder) as disk:
            engine = engine_of(comm, "gpt", axes, seed=7, **options)
            engine.load(disk)
        losses.append((differing(engine.engine.state_dict(), saved), run(engine, 1, 2)))
    return losses


def test_hosts_that_share_no_folder_save_and_load_under_any_mesh(tmp_path):
    for expected, *others in launch(apart, 4, tmp_path):
        for unequal, losses in others:
            assert unequal == [] and losses[0] == pytest.approx(expected[0], rel=1e-4)
    assert sorted(path.name for path in tmp_path.glob("*/saved")) == ["saved", "saved"]
