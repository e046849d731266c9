"""A config.json from elsewhere: each field with each kind of bad value, and sizes that would be built for hours."""

import json
import os

import pytest
from bad_files import BAD, HOLE, LONG, as_text, command, refused, ten_of, with_hole
from estimate_kit import CONFIGS

from refimpl.estimate import hugging_face

CONFIG = CONFIGS["llama"] | {"num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
                             "bos_token_id": 1, "architectures": ["LlamaForCausalLM"], "id2label": {"0": "a"},
                             "mixture": 3}
SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
         "num_hidden_layers", "max_position_embeddings")
ALWAYS = ("NaN", "2^63", "nested", "10^8 letters")  # refused in every field
NAMES = ("mixture", "architectures", "id2label", "bos_token_id")  # that change no tensor


@pytest.fixture(scope="module", autouse=True)
def imported(tmp_path_factory):
    """What an import takes is not counted."""
    command("estimate", written(tmp_path_factory.mktemp("first"), CONFIG), "--sequence", 8)


@pytest.mark.alone
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("field", [*CONFIG])
@pytest.mark.parametrize("builder", ["refimpl", "transformers"])
def test_a_bad_field_is_refused_in_one_line(tmp_path, builder, field, bad):
    path = tmp_path / "config.json"
    found = dict(CONFIG)
    with_hole(found, (field,), bad)
    text = json.dumps(found)
    path.write_text(text if bad == "missing" else text.replace(f'"{HOLE}"', as_text(bad)))
    if bad == "missing" and field in SIZES and builder == "transformers":
        return  # then it is that of the family's, which is a large model
    words = refused(lambda: command("estimate", path, "--builder", builder, "--sequence", "8"), tmp_path)
    path.unlink()
    if bad in ALWAYS or field in SIZES and bad != "missing" or field == "model_type":
        assert words is not None
    harmless = ("missing",) if field == "architectures" else ("missing", "markup")  # it is to be a list
    if field in NAMES and bad in harmless and (builder == "refimpl" or field in ("mixture", "id2label")):
        assert words is None or "transformers makes no config" in words


def test_ten_of_these(tmp_path):
    for builder, field, bad in ten_of(("refimpl", "transformers"), CONFIG, BAD):
        test_a_bad_field_is_refused_in_one_line(tmp_path, builder, field, bad)


def written(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(("change", "words"), [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: expected at most 10,000"),
    ({"n_layer": 10**9}, "n_layer=1000000000"), ({"num_labels": 10**7}, "num_labels=10000000: expected"),
    ({"text_config": {"num_experts": 10**9}}, "num_experts=1000000000"),
    ({"id2label": dict.fromkeys(range(110_000), "")}, "id2label has more than 100,000 entries"),
    ({"attn_implementation": "someone/kernel"}, "nothing is downloaded for an estimate"),
    ({"x": [[[[[[[[[[[[[[[[[[[[[[3]]]]]]]]]]]]]]]]]]]]]]}, "deeper than 20")])
@pytest.mark.parametrize("builder", ["refimpl", "transformers"])
def test_what_would_be_built_for_hours_is_refused_at_once_with_its_key(tmp_path, builder, change, words):
    path = written(tmp_path, CONFIG | change)
    assert words in refused(lambda: command("estimate", path, "--builder", builder), tmp_path)


@pytest.mark.parametrize("name", ["gpus", "batch", "sequence"])
def test_a_million_ranks_and_more_are_refused_at_once(tmp_path, name):
    number = 2**63 if name != "gpus" else 10**6
    path = written(tmp_path, CONFIG)
    words = refused(lambda: command("estimate", path, f"--{name}", number), tmp_path)
    assert f"{name}={number}: expected at most " in words


def test_a_pipe_and_a_file_that_is_too_large(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    assert "no file" in refused(lambda: command("estimate", tmp_path / "pipe.json"), tmp_path)
    (tmp_path / "large.json").write_text(json.dumps({"id2label": {str(i): "a label" for i in range(300_000)}}))
    assert "expected at most 4,194,304" in refused(lambda: command("estimate", tmp_path / "large.json"), tmp_path)
    assert hugging_face.LIMIT < LONG
