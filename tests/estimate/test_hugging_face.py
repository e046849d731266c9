"""A config.json: counts of published weights, by transformers and our GPT; keys that are unknown; what is refused."""

import sys

import outside  # noqa: F401 - so that transformers can be imported
import pytest
import torch
from estimate_kit import CONFIGS

from refimpl import catalog
from refimpl.estimate import Options, estimate
from refimpl.estimate.model_sources import find
from refimpl.model import GPTConfig

LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, "hidden_size": 4096,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
         "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False}
PUBLISHED = {  # sizes of the published config.json
    "llama3-8b": LLAMA,
    "mistral-7b": LLAMA | {"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768,
                           "rope_theta": 10000.0, "sliding_window": 4096},
    "qwen2.5-7b": LLAMA | {"model_type": "qwen2", "vocab_size": 152064, "max_position_embeddings": 131072,
                           "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
                           "num_key_value_heads": 4, "intermediate_size": 18944, "rope_theta": 1000000.0,
                           "rms_norm_eps": 1e-06, "use_sliding_window": False},
    "gemma2-9b": {"model_type": "gemma2", "vocab_size": 256000, "max_position_embeddings": 8192, "hidden_size": 3584,
                  "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
                  "intermediate_size": 14336},
    "pythia-410m": {"model_type": "gpt_neox", "vocab_size": 50304, "max_position_embeddings": 2048,
                    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                    "intermediate_size": 4096, "tie_word_embeddings": False},
    "gpt2": {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12,
             "n_head": 12}}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_catalog_s_count_is_that_of_transformers_model(written, name):
    with torch.device("meta"):
        source = find(written(PUBLISHED[name]), Options(sequence=8))
        model, _, batch = source.build()
    assert source.built_by.startswith("transformers ") and set(batch) == {"input_ids", "labels"}
    assert [each.partition(": ")[0] for each in source.assumed] == ["architectures is not given"]
    assert sum(p.numel() for p in model.parameters()) == catalog.published_parameters(name)


@pytest.mark.parametrize("name", ["llama3-8b", "mistral-7b", "qwen2.5-7b", "gpt2"])
def test_our_gpt_of_it_is_the_catalog_s(written, name):
    with torch.device("meta"):
        source = find(written(PUBLISHED[name]), Options(sequence=8, builder="refimpl"))
        config = source.build()[0].config
    named = GPTConfig.named(name, dropout=0.1 if name == "gpt2" else 0.0)
    assert config == named and source.built_by == "refimpl's GPT"
    assert any("sliding_window=4096 is not built" in each for each in source.assumed) == (name == "mistral-7b")


def test_without_transformers_our_gpt_stands_in_and_says_so(written, monkeypatch):
    path = written(CONFIGS["llama"])
    theirs = estimate(path, sequence=16)
    monkeypatch.setitem(sys.modules, "transformers", None)
    ours = estimate(path, sequence=16)
    assert ours.built_by == "refimpl's GPT" and "our GPT stands in" in ours.assumed[0]
    assert ours.parameters == theirs.parameters and ours.peak["optimizer state"] != 0
    with pytest.raises(ValueError, match="builder='transformers': transformers cannot be imported .*; install it, or"):
        estimate(path, builder="transformers")
    with pytest.raises(ValueError, match="model_type='opt': our GPT stands in for llama, mistral, qwen2, gpt2; ins"):
        estimate(written({"model_type": "opt"}))


@pytest.mark.parametrize("builder", ["transformers", "refimpl"])
def test_keys_that_are_unknown_are_named_with_what_was_assumed(written, builder):
    found = find(written(CONFIGS["llama"] | {"mixture": 3, "torch_dtype": "bfloat16"}), Options(builder=builder))
    said = [each for each in found.assumed if "unknown" in each]
    assert len(said) == 1 and said[0].startswith("mixture=3 is unknown") and "assumed to change nothing" in said[0]
    assert any("rope_theta is not given: assumed 10000.0" in each for each in found.assumed) == (builder == "refimpl")


HEADS = ["apertus", "cohere", "exaone4", "flex_olmo", "gemma2", "gemma3_text", "glm4", "glm4_moe", "gpt_neox",
         "granite", "llama", "mistral", "mixtral", "nanochat", "olmo2", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe",
         "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"]


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_dim_that_changes_bytes_is_not_said_to_change_nothing(written, kind):
    """Also where the model reads it and its class of configs does not declare it, as Qwen3-MoE's."""
    config = LLAMA | {"model_type": kind, "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 1,
                      "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64, "pad_token_id": 0}
    counts, said = set(), set()
    for head_dim in (16, 64):
        with torch.device("meta"):
            source = find(written(config | {"head_dim": head_dim}), Options(sequence=8))
            counts.add(sum(p.numel() for p in source.build()[0].parameters()))
        said |= {each for each in source.assumed if "head_dim" in each}
    assert len(counts) == 1 or not said
    if kind in ("llama", "mistral", "qwen3", "qwen3_moe", "gemma2", "glm4_moe"):
        assert len(counts) == 2, "it is read"


@pytest.mark.parametrize(("config", "options", "message"), [
    ({"vocab_size": 3}, {}, r"config\.json has no model_type: expected the config\.json of a model"),
    ({"model_type": "unheard"}, {}, "transformers makes no config of it: .*unheard"),
    (LLAMA | {"quantization_config": {}}, {}, "quantization_config: weights in fewer bits are not estimated; remove"),
    (CONFIGS["llama"], {"sequence": 65}, r"sequence=65: .*config\.json has a context of 64 tokens"),
    ({"model_type": "llama", "vocab_size": 3}, {"builder": "refimpl"}, "max_position_embeddings, num_hidden_layers, "
     "hidden_size, num_attention_heads of a llama is missing: add it"),
    (LLAMA | {"attention_bias": True}, {"builder": "refimpl"}, "attention_bias=True: our GPT has False alone; install"),
    (CONFIGS["llama"] | {"num_hidden_layers": -1}, {"builder": "refimpl"}, r"config\.json: num_hidden_layers=-1, "
     "layers=-1: expected an integer of at least 1"),
    (CONFIGS["gpt2"] | {"attn_pdrop": 0.0}, {"builder": "refimpl"}, "attn_pdrop=0.0.*dropout in all places or in none"),
])
def test_a_config_of_no_model_is_refused(written, config, options, message):
    with pytest.raises(ValueError, match=message):
        find(written(config), Options(**options))


def test_a_bad_size_is_refused_before_transformers_is_imported(written, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="num_hidden_layers=1000000000: expected at most"):
        find(written(LLAMA | {"num_hidden_layers": 10**9}), Options(builder="transformers"))


def test_what_is_no_file_no_json_or_no_attention_of_the_model(written, tmp_path):
    gemma = PUBLISHED["gemma2-9b"] | {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32}
    with pytest.raises(ValueError, match="attention='sdpa': transformers has none of this model .*; give another, or"):
        estimate(written(gemma), sequence=8, attention="sdpa")
    with pytest.raises(FileNotFoundError, match=r"no file .*absent\.json: expected a name of the catalog"):
        estimate(str(tmp_path / "absent.json"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        estimate(str(tmp_path))


def test_a_dropout_of_all_elements_is_no_share(written):
    all_of_it = CONFIGS["gpt2"] | dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 1.0)
    with pytest.raises(ValueError, match="embd_pdrop=1.0: expected a share from 0 to below 1"):
        find(written(all_of_it), Options(builder="refimpl"))
