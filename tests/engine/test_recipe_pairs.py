"""Each pair of two fields' values composes, or is refused by a rule that names both; bytes are those of a dry run."""

import functools
import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import recipe_kit as kit
import torch
from outside.models import GROUPED, causal

from refimpl.comm import launch
from refimpl.comm.simulating import simulate
from refimpl.engine import Recipe, build, together
from refimpl.engine.recipe_rules import RULES
from refimpl.engine.recipe_text import document
from refimpl.mesh import Mesh
from refimpl.model import GPT
from refimpl.offload.disk_store import buffers_bytes

ROWS = kit.covering()
MESSAGE = 4 * kit.ROWS * kit.CONFIG.context_length * kit.CONFIG.hidden // 4  # a micro-batch; how many wait, time tells
OFF, STATE = 0.005, 5056  # of the peak; a generator's state, of each region: a dry run has none


def on_ranks(values):
    """[(losses, bytes)] of all ranks."""
    world = kit.world_of(values)
    if world == 1:
        return [kit.trained(None, values)]
    return launch(in_a_process, world, values, device="cpu")


def in_a_process(comm, values):
    torch.set_num_threads(1)
    return kit.trained(comm, values)


@pytest.mark.parametrize("row", [pytest.param(n, marks=pytest.mark.nightly if n % 13 else () if n % 39 else
                                              pytest.mark.core) for n in range(len(ROWS))])
def test_rows_that_hold_each_pair(row):
    values = ROWS[row]
    for rank, (losses, nbytes) in enumerate(on_ranks(values)):
        away, most = kit.far(values, losses)
        assert away <= most, (values, losses)
        dry = kit.asked(values, rank)
        waits = nbytes.get("communication", 0) - dry.get("communication", 0)
        assert 0 <= waits <= MESSAGE * 2 * values.get("micro_batches", 1) * (2 if "pp" in values else 0)
        buffers = buffers_bytes(8 * 2**20, 6) if values.get("store") == "disk" else 0  # a dry run opens no file
        foretold, read = sum(dry.values()), sum(nbytes.values()) - waits - buffers
        states = round((read - foretold) / STATE) * STATE if values.get("recompute", "none") != "none" else 0
        assert abs(read - foretold - states) <= OFF * read and 0 <= states <= 8 * STATE, (values, rank, foretold, read)


def test_the_rows_hold_every_pair_that_composes():
    held = set().union(*map(kit.of, ROWS))
    for pair in kit.pairs():
        assert bool(kit.fits(pair)) == (frozenset(pair.items()) in held) or not kit.fits(pair), pair
    assert 100 < len(ROWS) < 200


def test_the_document_is_what_is_tested():
    """Write it anew with `UPDATE=1 pytest tests/engine/test_recipe_pairs.py -k document`."""
    pairs = sum(bool(kit.fits(pair)) for pair in kit.pairs())
    path, text = Path(__file__).parents[2] / "docs" / "recipe.md", document(Recipe, len(ROWS), pairs)
    if os.environ.get("UPDATE") == "1":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text


def test_every_pair_that_is_refused_is_refused_by_a_rule_that_names_it():
    for pair in kit.pairs():
        whole = kit.completed(pair)
        for rule in kit.refusals(whole) if whole else ():
            with pytest.raises(ValueError) as caught:
                Recipe(**whole)
            assert rule.why in str(caught.value) and all(f"{name}=" in str(caught.value) for name in rule.names)


def test_each_rule_refuses_something_and_names_fields():
    for rule in RULES:
        assert set(rule.names) <= kit.DEFAULTS.keys() and rule.why
        assert not rule.holds(Recipe())


def llama(comm, values):
    torch.set_num_threads(1)
    return kit.trained(comm, values, make=kit.LLAMA)


@pytest.mark.parametrize("values", [
    {"precision": "fp16", "recompute": "attention", "micro_batches": 2}, {"mlp": "input", "activations": "int8"},
    {"loss": "chunked", "precision": "autocast", "micro_batches": 2},
    pytest.param({"loss": "chunked", "pp": 2, "micro_batches": 4}, marks=pytest.mark.nightly),
    pytest.param({"loss": "chunked", "cp": 2, "recompute": "blocks"}, marks=pytest.mark.nightly),
    pytest.param({"loss": "chunked", "dp": 2, "zero": 3}, marks=pytest.mark.nightly),
    {"tp": 2, "sequence": True, "recompute": "blocks", "precision": "bf16", "micro_batches": 2},
    pytest.param({"pp": 2, "dp": 2, "mlp": "hidden", "precision": "bf16", "micro_batches": 2},
                 marks=pytest.mark.nightly),
    pytest.param({"zero": 3, "dp": 3, "recompute": "blocks", "store": "host"}, marks=pytest.mark.nightly),
    pytest.param({"cp": 2, "zero": 2, "update": "host", "precision": "bf16"}, marks=pytest.mark.nightly)], ids=str)
def test_a_model_that_others_wrote(values):
    world = kit.world_of(values)
    found = launch(llama, world, values, device="cpu") if world > 1 else [llama(None, values)]
    for rank, (losses, nbytes) in enumerate(found):
        away, most = kit.far(values, losses, kit.LLAMA)
        off = sum(nbytes.values()) - sum(kit.asked(values, rank, kit.LLAMA).values())
        states = round(off / STATE) * STATE if values.get("recompute", "none") != "none" else 0
        assert away <= 2 * most and abs(off - states) <= OFF * sum(nbytes.values()), (rank, off)


@pytest.mark.parametrize(("values", "words"), [
    ({"attention": "tiles"}, "attention=\"tiles\" of a LlamaForCausalLM: its own is sdpa; give attn_implementation"),
    ({"recompute": "attention core"}, "a LlamaDecoderLayer has no attention core"),
    ({"dp": 2}, "2 ranks, and 1 are here")])
def test_what_a_model_does_not_have_is_named(values, words):
    with pytest.raises(ValueError, match=words):
        build(Recipe(**values), kit.LLAMA())


WIDE = causal("llama", **GROUPED | {"hidden_size": 32, "vocab_size": 8192, "max_position_embeddings": 64})


def dry_llama(**values):
    return sum(kit.asked(values, 0, WIDE).values())


@pytest.mark.parametrize(("values", "words"), [
    ({"tp": 2}, "its head is split over ranks of tp"),
    ({"pp": 2, "schedule": "zb-h1", "micro_batches": 4}, "schedule zb-h1 divides backwards")])
def test_a_loss_without_logits_of_others(values, words):
    assert dry_llama(loss="chunked") < dry_llama() - 4 * 8192 * kit.ROWS * kit.CONFIG.context_length
    with pytest.raises(ValueError, match=words):
        dry_llama(loss="chunked", **values)


def scaled(comm):
    """Norms of gradients in fp16 and fp32, and whether a step that overflows leaves the parameters of an fp16 GPT."""
    torch.set_num_threads(1)
    found, x = {}, torch.arange(32).repeat(4, 1)
    for precision in ("fp32", "fp16"):
        torch.manual_seed(0)
        recipe = Recipe(precision=precision, dp=comm.world_size, zero=2, loss_scale_power=8)
        engine = build(recipe, GPT(kit.CONFIG), comm)
        engine.train_step(x, x)
        found[precision] = engine.clip_grad_norm_(1.0).item()
        engine.step()
    before = [p.detach().clone() for p in engine.model.parameters()]
    engine.train_step(x, x)
    next(each for shards in engine.engine.gradients() for each in shards).fill_(float("inf"))
    engine.clip_grad_norm_(1.0), engine.step()
    stays = all(torch.equal(a, b) for a, b in zip(before, engine.model.parameters(), strict=True))
    engine.train_step(x, x)  # the factor of the skipped step is forgotten
    return found, stays, engine.scaler.skipped_steps, engine.clip_grad_norm_(1.0).item()


def test_fp16_gradients_are_divided_in_norms_and_steps():
    for norms, stays, skipped, later in launch(scaled, 3, device="cpu"):
        assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.01) and stays and skipped == 1
        assert 0 < later < 100


def left(comm, make, layers, values):
    """The layers of a model that are alive on a rank of a pipeline."""
    model = make()
    alive = [weakref.ref(each) for each in model.get_submodule(layers)]
    engine = build(Recipe(pp=2, **values), model, comm)
    del model
    gc.collect()
    return len([each for each in alive if each() is not None]), len(engine.pipe.stages)


@pytest.mark.parametrize(("make", "layers", "values"), [
    (functools.partial(GPT, kit.CONFIG), "blocks", {"loss": "chunked"}), (kit.LLAMA, "model.layers", {})],
    ids=["a loss without logits", "the loss of others"])
def test_a_pipeline_holds_no_layer_of_another_stage(make, layers, values):
    assert launch(left, 2, make, layers, values, device="cpu") == [(2, 1)] * 2


def alive_when_the_engine_begins(comm):
    """How many layers there are when ZeRO asks for the optimizer."""
    alive, counts = [], []

    def made():
        model = GPT(kit.CONFIG)
        alive.extend(weakref.ref(block) for block in model.blocks)
        return model

    def optimizer(parameters):
        counts.append(sum(each() is not None for each in alive))
        return torch.optim.SGD(parameters)

    together(made(), Mesh(pp=2).connect(comm), optimizer)
    return counts[0]


def test_layers_of_other_stages_go_before_the_engine_takes_bytes():
    assert launch(alive_when_the_engine_begins, 2, device="cpu") == [2, 2]


def test_compressed_activations_under_attention_in_tiles_are_foretold():
    values = {"activations": "int8", "attention": "tiles", "micro_batches": 2}
    assert kit.asked(values) == {**kit.trained(None, values)[1]}


@functools.cache
def dry(**values):
    return kit.asked(values)


@pytest.mark.parametrize(("values", "category", "share"), [
    ({"precision": "bf16"}, "parameters", 0.5), ({"precision": "bf16"}, "gradients", 0.55),
    ({"micro_batches": 4}, "activations", 0.4), ({"recompute": "blocks"}, "activations", 0.6),
    ({"recompute": 2}, "activations", 0.8), ({"recompute": 0.5}, "activations", 0.8),
    ({"recompute": "mlp"}, "activations", 0.8), ({"recompute": "attention"}, "activations", 0.9),
    ({"activations": "int8"}, "activations", 0.6),
    ({"mlp": "input"}, "activations", 0.8), ({"mlp": "hidden"}, "activations", 0.95),
    ({"store": "host"}, "optimizer state", 0.6), ({"update": "host"}, "optimizer state", 0.1),
    ({"optimizer": "sgd"}, "optimizer state", 0.1), ({"optimizer": "momentum"}, "optimizer state", 0.55),
    ({"dp": 2}, "optimizer state", 0.55), ({"dp": 2, "zero": 2, "bucket_bytes": 4096}, "gradients", 0.6),
    ({"dp": 2, "zero": 3}, "gradients", 0.1), ({"tp": 2}, "parameters", 0.7), ({"pp": 2}, "parameters", 0.7),
    ({"cp": 2}, "activations", 0.6), ({"tp": 2, "sequence": True}, "activations", 0.7)], ids=str)
def test_what_saves_bytes_saves_them(values, category, share):
    assert dry(**values).get(category, 0) <= share * dry()[category]


def test_a_recipe_whose_field_is_ignored_is_seen(monkeypatch):
    """Rows compare bytes with a dry run of the same code: this one that both forget is seen by what it would save."""
    monkeypatch.setattr(sys.modules["refimpl.engine.together"], "recomputed_part", lambda layers, recompute: None)
    assert kit.asked({"recompute": "blocks"})["activations"] > 0.9 * dry()["activations"]


def test_ranks_in_threads_say_the_same():
    values = {"dp": 2, "tp": 2, "precision": "bf16", "recompute": "blocks"}
    assert simulate(kit.trained, 4, values)[0][0] == pytest.approx(on_ranks(values)[0][0], abs=1e-3)
