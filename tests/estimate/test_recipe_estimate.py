"""Estimates of recipes: what the command prints, and what real ranks of models that others wrote hold."""

import functools
import json
import time
from pathlib import Path

import jsonschema
import outside  # noqa: F401 - so that transformers can be imported
import pytest
import recipe_kit as kit
import torch
from patience import processor_seconds
from recipe_models import CONFIGS, OTHERS, RECIPES, REFUSED, written

from refimpl import catalog, cli
from refimpl.comm import launch
from refimpl.engine import Recipe
from refimpl.estimate import Options, estimate
from refimpl.estimate.model_sources import find
from refimpl.estimate.recipe_estimate import fitted, why

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "estimate.schema.json").read_text())
STATE = 5056  # a generator's state, of each region: a dry run has none
OPTIONS = {"sequence": kit.CONFIG.context_length, "gpu": "cpu"}


def made(path):
    return find(path, Options(**OPTIONS)).build()[0].train()


def on_a_rank(comm, path, values):
    torch.set_num_threads(1)
    return kit.trained(comm, values, make=functools.partial(made, path))


def off(path, values):
    """(bytes that the fullest real rank holds more than was estimated, bytes that it holds)."""
    found = estimate(path, Recipe(**values), batch=kit.ROWS // values.get("dp", 1), **OPTIONS)
    world = kit.world_of(values)
    real = launch(on_a_rank, world, path, values, device="cpu") if world > 1 else [on_a_rank(None, path, values)]
    most = max(sum(nbytes.values()) for _, nbytes in real)
    return most - found.peak.total, most


PAIRS = [(kind, i) for kind in CONFIGS for i in range(len(RECIPES))]


@pytest.mark.parametrize(("kind", "number"), [
    pytest.param(*pair, marks=() if n % 9 == 4 else pytest.mark.nightly) for n, pair in enumerate(PAIRS)])
def test_real_ranks_hold_what_was_estimated(kind, number, tmp_path):
    values = OTHERS.get((kind, number), RECIPES[number])
    if (kind, number) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[kind, number]):
            off(written(tmp_path, kind), values)
        return
    more, held = off(written(tmp_path, kind), values)
    states = round(more / STATE) * STATE if values.get("recompute") else 0
    assert abs(more - states) <= 0.005 * held and 0 <= states <= 8 * STATE, (more, held)


def test_the_json_is_what_its_schema_says(tmp_path, capsys):
    path = written(tmp_path, "llama")
    cli.main(["estimate", path, "--json", "--tp", "2", "--pp", "2", "--micro-batches", "2", "--batch", "2",
              "--sequence-parallel", "--gpu", "t4"])
    read = json.loads(capsys.readouterr().out)
    jsonschema.validate(read, SCHEMA)
    found = estimate(path, Recipe(tp=2, pp=2, micro_batches=2, sequence=True), batch=2, gpu="t4")
    assert read["recipe"]["pp"] == 2 and read["ranks"][0]["peak"] == {**found.peak, "total": found.peak.total}
    assert sum((each["which"] for each in read["ranks"]), [])[0] == "fullest" and read["gpu"]["fits"] is True
    assert {name for each in read["ranks"] for name in each["which"]} == {"fullest", "first", "last"}
    cli.main(["estimate", path, "--json"])
    jsonschema.validate(json.loads(capsys.readouterr().out), SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**read, "version": 2}, SCHEMA)


def test_text_has_the_ranks_of_a_pipeline_and_what_they_send(tmp_path, capsys):
    path = written(tmp_path, "llama")
    cli.main(["estimate", path, "--pp", "4", "--gpus", "8", "--micro-batches", "4", "--batch", "4", "--precision",
              "fp16"])
    said = capsys.readouterr().out
    assert "8 GPUs: dp 2 × pp 4" in said and "fullest and first: rank" in said and "\nlast: rank 6" in said
    assert said.index("\nmiddle:") < said.index("\nlast:")
    assert "\nmiddle: rank 4 (tp 0, cp 0, dp 0, pp 2)" in said and "sent in a step: pp 32.2 KiB, dp × cp " in said
    assert "bounded: a message" in said


@pytest.mark.parametrize(("given", "changed"), [
    (["--tp", "2"], {"tp": 2}), (["--offload", "disk"], {"store": "disk", "update": "host", "folder": "."}),
    (["--offload", "host", "--precision", "bf16-master"], {"store": "host", "update": "host", "precision": "bf16"}),
    (["--replicas", "2", "--gpus", "8", "--tp", "2"], {"dp": 4, "shards": 2, "tp": 2}),
    (["--recompute", "attention core"], {"recompute": "attention core"}), (["--recompute", "2"], {"recompute": 2}),
    (["--recompute", "0.5", "--zero", "3"], {"recompute": 0.5, "zero": 3}),
    (["--recompute", "--loss", "chunked"], {"recompute": "blocks", "loss": "chunked"}),
    (["--schedule", "zb-v", "--pp", "2", "--micro-batches", "4"], {"schedule": "zb-v", "pp": 2, "micro_batches": 4}),
    (["--precision", "fp16", "--loss-scale-power", "8"], {"precision": "fp16", "loss_scale_power": 8})])
def test_options_are_fields(given, changed, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr("refimpl.estimate.recipe_options.estimate_recipe",
                        lambda model, recipe, world, **options: asked.append(recipe))
    monkeypatch.setattr("refimpl.estimate.recipe_options.recipe_report.as_text", lambda found: "")
    cli.main(["estimate", "gpt2", *given])
    assert asked[0].changed() == changed


def test_a_file_is_changed_by_options(tmp_path, monkeypatch, capsys):
    (tmp_path / "recipe.toml").write_text(Recipe(precision="bf16", tp=2, recompute="blocks").to_toml())
    cli.main(["estimate", written(tmp_path, "llama"), "--recipe", str(tmp_path / "recipe.toml"), "--dp", "2",
              "--recompute", "none", "--why", str(tmp_path / "recipe.toml")])
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("dp 1 → 2: −") and second.startswith("recompute blocks → none: +")


@pytest.mark.parametrize(("arguments", "message"), [
    (["--tp", "3", "--gpus", "8"], "tp=3 × cp=1 × dp=1 × pp=1 are 3 ranks, and 8 are here"),
    (["--tp", "5"], "expected a multiple of the ranks, or a divisor of them"),
    (["--pp", "2", "--schedule", "gpip"], "gpipe?"), (["--replicas", "3", "--gpus", "4"], "replicas=3 of dp=4"),
    (["--micro-batches", "3", "--batch", "4"], "rows=4 in 3 micro-batches"),
    (["--recompute", "all"], "recompute='all'"),
    (["--recipe", "none.toml"], "No such file"), (["--dp", "2", "--compression", "sign", "--reduce-dtype", "fp32"],
                                                  "a compressor says what is sent"),
    (["--budget", "1KiB"], "with every block recomputed the fullest rank still holds")])
def test_what_cannot_be_is_one_line(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["estimate", written(tmp_path, "llama"), *arguments])
    assert done.value.code == 2 and message in capsys.readouterr().err


def test_a_budget_takes_the_fewest_recomputed_blocks(tmp_path):
    path = written(tmp_path, "llama")
    peaks = {share: estimate(path, Recipe(recompute=share), batch=8, gpu="cpu").peak.total
             for share in ("none", 0.25, 0.5, 0.75, "blocks")}
    assert sorted(peaks.values(), reverse=True) == [*peaks.values()]
    for share, peak in peaks.items():
        assert fitted(path, Recipe(), peak, batch=8, gpu="cpu").recompute == share
    assert fitted(path, Recipe(), peaks[0.5] - 1, batch=8, gpu="cpu").recompute == 0.75


def test_why_is_a_sum_of_lines(tmp_path):
    """Each line begins where the last one ends, so differences add up; a field that needs another waits."""
    one, two = Recipe(), Recipe(dp=2, zero=3, look_ahead=2, store="disk", folder=".", precision="bf16")
    path = written(tmp_path, "qwen3")
    found = why(path, one, two, batch=2, gpu="cpu")
    assert [set(each.changes) for each in found] == [
        {"dp"}, {"precision"}, {"zero"}, {"store", "folder"}, {"look_ahead"}]
    first, last = (estimate(path, each, batch=2, gpu="cpu").peak.total for each in (one, two))
    assert first + sum(each.difference.total for each in found) == last
    assert found[0].before.peak.total == first and why(path, one, one, batch=2, gpu="cpu") == []


def test_a_recipe_on_one_device_is_the_plain_estimate(tmp_path):
    """Two roads: a loop with the model's own loss, and an engine; the loss of the second is divided once more."""
    path = written(tmp_path, "llama")
    for given in ({"zero": 1}, {"zero": 3}):
        engine = estimate(path, Recipe(dp=2, **given), batch=2, **OPTIONS).peak
        loop = estimate(path, gpus=2, batch=2, **given, **OPTIONS).peak
        assert abs(engine.total - loop.total) <= 0.03 * loop.total and engine["parameters"] == loop["parameters"]


@pytest.mark.parametrize(("model", "options", "seconds"), [
    ("llama3-405b", {"tp": 8, "pp": 16, "dp": 64, "micro_batches": 32, "precision": "bf16", "recompute": "blocks",
                     "sequence": True}, 30),
    ("qwen3-30b-a3b", {"dp": 8, "zero": 3, "precision": "bf16"}, 20)])
def test_large_models_in_seconds(model, options, seconds, tmp_path):
    if model not in catalog.model_names():
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE))
        model = str(tmp_path / "config.json")
    began = time.process_time()
    found = estimate(model, Recipe(**options), batch=options.get("micro_batches", 1), sequence=4096, gpu="h100-sxm")
    assert processor_seconds(time.process_time() - began) < seconds
    assert found.fits is (options["dp"] == 64) and found.parameters > 30e9


QWEN3_MOE = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "moe_intermediate_size": 768,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "tie_word_embeddings": False, "vocab_size": 151936, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "norm_topk_prob": True, "rms_norm_eps": 1e-6}
