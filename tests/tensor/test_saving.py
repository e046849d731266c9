"""Split models saved and loaded: under other meshes and stages, as the whole model, in bytes that were predicted."""

import pytest
import split_saving_kit as kit
import torch
from rank_pool import on_ranks, pooled
from safetensors.torch import load_model
from split_saving_kit import MAX_NORM, MESHES, Meshes, built, losses
from tensor_kit import GPTS

from refimpl.comm import FakeCommunicator
from refimpl.tensor import tensor_parallel
from refimpl.zero import bucket
from refimpl.zero.internals import persistence

NAMES = "gpt", "gpt2", "llama", "grouped gpt", "tied llama"  # the place says on which stages


@pytest.mark.parametrize("name", NAMES)
def test_any_mesh_and_stage_loads_what_any_other_has_saved(name, tmp_path):
    (_, unequal, far, saved), *_ = ranks = pooled(kit.exchanged, 4, name, NAMES.index(name), tmp_path)
    assert all(written == predicted for sizes, *_ in ranks for written, predicted in sizes.values())
    assert unequal == {(source, tp): [] for source in MESHES for tp in MESHES}
    assert far.keys() == unequal.keys() and max(far.values()) <= 1e-12
    for tp, sd in saved.items():  # names and shapes are those of the unsplit model, whose own library loads the file
        model, folder = built(name, seed=7), tmp_path / str(tp)
        assert {key: x.shape for key, x in sd["model"].items()} == {k: x.shape for k, x in model.state_dict().items()}
        if name in GPTS:
            load_model(model, folder / "model.safetensors")
        else:
            model.config.save_pretrained(folder)
            model = type(model).from_pretrained(folder, dtype=torch.float64)
        loaded = model.state_dict()
        assert loaded.keys() == sd["model"].keys()
        assert all(torch.equal(loaded[key], x) for key, x in sd["model"].items())


def test_masters_of_16_bit_models_too(tmp_path):
    ranks = pooled(kit.exchanged_in_16_bits, 4, "grouped gpt", {2: 1, 4: 3, 1: 2}, tmp_path)
    assert [unequal for unequal, _ in ranks] == [[]] * 4
    assert ranks[0][1] == {torch.float32}  # of masters and moments


@pytest.mark.parametrize("stage", [1, 3])
def test_in_hybrid_sharding_too(stage, tmp_path):
    found = pooled(kit.exchanged_with_replicas, 4, "grouped gpt", stage, tmp_path)
    assert found == [([], 5), ([], 0), ([], 0), ([], 0)]  # rank 0 alone has the whole


def cuts(name, tp, dp, bucket_bytes):
    """[{(spec, data-parallel rank, first, end)} of what several ranks hold] of each rank of a tensor-parallel group."""
    found = []
    for rank in range(tp):
        model = tensor_parallel(built(name), FakeCommunicator(rank, tp))
        buckets = bucket.buckets_of(model.named_parameters(), dp, bucket_bytes)
        found.append({(piece.slot.parameter.shard_spec, d, piece.first, piece.end) for each in buckets
                      for d in range(dp) for piece in each.pieces(d) if piece.slot.parameter.shard_spec.replicas})
    return found


@pytest.mark.parametrize(("name", "tp"), [("gpt", 2), ("gpt", 4), ("grouped gpt", 4)])
def test_what_several_ranks_hold_is_cut_alike_beside_parts_of_other_sizes(name, tp, monkeypatch):
    def unlike():
        return [size for size in range(4000, 40000, 4000) for ranks in [cuts(name, tp, 2, size)]
                if any(cut not in ranks[other] for mine in ranks for cut in mine for other in cut[0].replicas)]

    assert unlike() == []
    monkeypatch.setattr(bucket, "room_of", torch.Tensor.numel)
    assert unlike()


def one_part(shards):
    """A save that takes the first part of each tensor alone."""
    return lambda engine: list({shard.spec.name: shard for shard in reversed(shards(engine))}.values())


FAULTS = {"one part": ("grouped gpt", 2, 1, r"qkv\.(weight|bias): .*elements are on no rank"),
          "drifted": ("llama", 4, 0, r"model.layers.1.self_attn.v_proj.weight is not the same on ranks \[2, 3\]")}


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(4)
def test_a_part_that_is_missing_or_not_the_same_is_named_at_a_save(comm, fault, tmp_path):
    *how, said = FAULTS[fault]
    engine = Meshes(comm).engine(*how)
    losses(engine, range(1), MAX_NORM)
    with pytest.MonkeyPatch.context() as patch, pytest.raises((ValueError, RuntimeError), match=said):
        if fault == "one part":
            patch.setattr(persistence, "shards", one_part(persistence.shards))
        elif comm.rank == 3:
            engine.model.model.layers[1].self_attn.v_proj.weights[0].data[0, 0] += 1e-9
        engine.save(tmp_path)
