"""A model on the meta device: each rank makes its own part, and all meshes begin with the same values."""

import pytest
import torch
from together_kit import ADAMW, built, differing

from refimpl import memory
from refimpl.comm import FakeCommunicator, launch
from refimpl.engine import together
from refimpl.engine.initial_values import RandomValues
from refimpl.mesh import Mesh
from refimpl.model import GPT, GPTConfig
from refimpl.sharding import ShardSpec, set_spec


def begun(comm, name, weights):
    """(what differs between a mesh of all ranks and one process, std of a block's output projection)."""
    saved = []
    for axes, ranks in (({"tp": 2, "pp": 2}, comm), ({}, FakeCommunicator(0, 1))):
        with torch.device("meta"):
            model = built(name)
        engine = together(model, Mesh(**axes).connect(ranks), ADAMW, micro_batches=2, weights=weights)
        saved.append(engine.engine.state_dict())
    return differing(*saved), saved[1]["model"]


@pytest.mark.parametrize("name", ["gpt", "grouped gpt", "tied llama"])
def test_all_meshes_begin_alike(name):
    (differ, found), *_ = launch(begun, 4, name, None)
    assert differ == []
    if name == "gpt":
        out, qkv = (found[f"blocks.1.attention.{key}.weight"].std().item() for key in ("out", "qkv"))
        assert out == pytest.approx(0.02 / 8**0.5, rel=0.1) and qkv == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(found[list(found)[2]], found[list(found)[3]])


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_from_a_file_of_the_whole_model(name, tmp_path):
    from safetensors.torch import save_model
    model = built(name, seed=3)
    save_model(model, tmp_path / "model.safetensors")
    (differ, found), *_ = launch(begun, 4, name, tmp_path / "model.safetensors")
    assert differ == [] and all(torch.equal(found[key], x) for key, x in model.state_dict().items())


def test_a_part_has_the_values_of_the_whole_and_another_seed_gives_others():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, context_length=32, layers=2, hidden=64, heads=4))
    name = "blocks.1.attention.qkv.weight"
    shape = tuple(model.get_parameter(name).shape)
    whole, part, other = torch.zeros(shape), torch.zeros(10, 64), torch.zeros(shape)
    set_spec(part, ShardSpec(name, shape, (20, 0), (10, 64)))
    before, values = torch.get_rng_state(), RandomValues(model, 0)
    values(name, whole), values(name, part), RandomValues(model, 1)(name, other)
    assert whole.std().item() == pytest.approx(0.02, rel=0.1) and torch.equal(part, whole[20:30])
    assert (whole != other).all() and torch.equal(torch.get_rng_state(), before)


def test_one_process_alone_gives_a_meta_model_its_values():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=16, context_length=4, layers=1, hidden=8, heads=2))
    engine = together(model, Mesh().connect(FakeCommunicator(0, 1)), ADAMW, seed=5)
    found, expected = engine.model.get_parameter("blocks.0.attention.qkv.weight"), torch.zeros(24, 8)
    RandomValues(model, 5)("blocks.0.attention.qkv.weight", expected)
    assert torch.equal(found, expected) and expected.std() > 0


def test_a_rank_makes_its_own_part_and_one_unit():
    """Rank 0 of tp 4 × pp 4 of a model of 16 layers: parameters of 1/16, and at most a layer and what it is made of."""
    config = GPTConfig(vocab_size=256, context_length=32, layers=16, hidden=128, heads=4)
    with memory.track() as t:
        with torch.device("meta"):
            model = GPT(config)
        engine = together(model, Mesh(tp=4, pp=4).connect(FakeCommunicator(0, 16)), ADAMW, micro_batches=4)
    mine = 4 * sum(p.numel() for p in engine.model.parameters())
    layer = 4 * sum(p.numel() for p in GPT(config).blocks[0].parameters())
    whole = 4 * config.parameter_count()
    assert mine < whole / 12
    assert t.peak.total < 2 * mine + 2 * layer < whole / 2
