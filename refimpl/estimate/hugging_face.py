"""A `config.json` of Hugging Face: built by transformers where it can be imported, else by our GPT."""

import inspect
import json
import math
import re
from pathlib import Path

import torch

from ..untrusted.files import text_of
from ..untrusted.text import shown
from ..versions import misfit
from . import our_gpt
from .architectures import batch_of, class_of
from .source import Source, of_gpt

# Keys that say nothing of a model's tensors: ids of tokens, generation, how a checkpoint was made and is named.
HARMLESS = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "decoder_start_token_id", "dtype", "torch_dtype", "transformers_version", "model_type", "use_cache",
    "cache_implementation", "initializer_range", "initializer_factor", "output_attentions", "output_hidden_states",
    "return_dict", "id2label", "label2id", "task_specific_params", "pretraining_tp", "gradient_checkpointing",
    "max_length", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "_attn_implementation",
    "attn_implementation",
}  # fmt: skip
# Keys that transformers turns into its own `rope_parameters`.
ROTARY = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_pct", "rotary_emb_base"}

CAUSAL = "ForCausalLM", "LMHeadModel"  # how the names of causal language models end
LIMIT, DEEP, LONG = 2**22, 20, 10**5  # bytes of a file; lists and dicts in each other; entries of one
# What is counted, by the last word of its key, and how many of it any model has.
COUNTS = {**dict.fromkeys(("layer", "layers", "block", "blocks", "experts", "stages", "depth", "depths", "codebooks",
                           "towers"), 10**4), "labels": LONG}
SIZES = {*COUNTS, "size", "dim", "head", "heads", "embd", "inner", "positions", "embeddings"}  # none is negative


def source(text, options):
    """Return the Source of a config.json, or of the folder that has one."""
    path = Path(text) / "config.json" if Path(text).is_dir() else Path(text)
    config = read(path)
    if "quantization_config" in config:
        raise ValueError(f"{path}: quantization_config: weights in fewer bits are not estimated; remove the key to "
                         "estimate the model in --precision")
    _check_architectures(path, config)
    if options.builder == "refimpl":
        return _by_our_gpt(path, config, options, [])
    try:
        return _by_transformers(path, config, options)
    except ImportError as error:
        why = f"transformers cannot be imported ({misfit(error) or str(error).splitlines()[0]})"
        if options.builder == "transformers":
            raise ValueError(f"builder='transformers': {why}; install it, or give builder='refimpl'") from error
        return _by_our_gpt(path, config, options, [f"{why}: our GPT stands in"])


def read(path):
    """Return a config.json as a dict. FileNotFoundError for no file, ValueError for one that describes no model."""
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}: expected a name of the catalog (refimpl.catalog.model_names()), a "
                                "config.json, or file.py:function")
    try:
        config = json.loads(text_of(path, LIMIT))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} has no model_type: expected the config.json of a model of Hugging Face, with "
                         "\"model_type\": \"llama\" or the like")
    _check(path, config)
    return config


def _check(path, config, sizes=()):
    """Refuse at once what would be built for hours, or is loaded from elsewhere. ValueError names the key. `sizes`:
    last words of keys of which none is negative."""
    todo = [("config", config, 0)]
    while todo:
        key, value, depth = todo.pop()
        expected = None
        if isinstance(value, (dict, list)):
            if depth == DEEP or len(value) > LONG:
                raise ValueError(f"{path}: {shown(key)[1:-1]} has more than {LONG:,} entries, or is deeper than {DEEP}")
            inside = value.items() if isinstance(value, dict) else ((key, each) for each in value)
            todo += [(name, each, depth + 1) for name, each in inside]
        elif isinstance(value, (int, float)):
            word = key.rpartition("_")[2]
            least, most = 0 if word in sizes else -2**53, COUNTS.get(word, 2**53)
            if not least <= value <= most and abs(value) != math.inf:
                expected = f"at most {most:,}" if value > most else f"a number, at least {least:,}"
        elif key.endswith("attn_implementation") and "/" in str(value):
            expected = "one of transformers' own: nothing is downloaded for an estimate"
        if expected is not None:
            raise ValueError(f"{path}: {shown(key)[1:-1]}={shown(value)}: expected {expected}")


def _check_architectures(path, config):
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(each, str) for each in named):
        raise ValueError(f"{path}: architectures={shown(named)}: expected a list of names of classes")
    if len(named) > 1:
        raise ValueError(f"{path}: architectures={shown(named)}: expected the one that is to be estimated")


def _by_our_gpt(path, config, options, assumed):
    for name in config.get("architectures") or []:
        if not name.endswith(CAUSAL):
            raise ValueError(f"{path}: architectures={shown(name)}: our GPT is a causal language model; install "
                             "transformers, or leave the key out")
    ours, more = our_gpt.config_of(path, config, HARMLESS)
    return of_gpt(str(path), ours, options, assumed + more)


def _by_transformers(path, config, options):
    _check(path, config, SIZES)  # our GPT checks its own
    import transformers

    given = {key: value for key, value in config.items() if key not in ("model_type", "transformers_version")}
    try:
        settings = transformers.AutoConfig.for_model(config["model_type"], **given)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"{path}: transformers makes no config of it: {error}") from error
    kind, label, assumed = class_of(path, config, settings)
    batch, shape = batch_of(path, kind, label, settings, options)
    return Source(str(path), f"transformers {transformers.__version__}, {kind.__name__}",
                  lambda: (_model(kind, settings, options, path), (), batch()), shape,
                  assumed + _unknown(settings, config, kind))


def _model(kind, settings, options, path):
    """Build it with the attention that was asked for, else with transformers' choice: sdpa where it has it."""
    try:
        return kind._from_config(settings, attn_implementation=options.attention, dtype=torch.get_default_dtype())
    except ValueError as error:
        if options.attention is None:
            raise
        raise ValueError(f"{path}: attention={options.attention!r}: transformers has none of this model "
                         f"({str(error).partition('. ')[0]}); give another, or none for its own choice") from error


def _unknown(settings, config, kind):
    """Say which keys of a config.json neither its class nor the code of its model knows. (transformers keeps every
    key, so a model may read one that its class does not declare: Qwen3-MoE's `head_dim`.)"""
    code = inspect.getsource(inspect.getmodule(kind))
    plain = type(settings)()
    known = HARMLESS | ROTARY | plain.to_dict().keys() | vars(plain).keys() | plain.attribute_map.keys()
    return [f"{key}={shown(config[key])} is unknown to {type(settings).__name__}: assumed to change nothing"
            for key in config if key not in known and not hasattr(type(settings), key)
            and not re.search(rf"""config\.{re.escape(key)}\b|config, ["']{re.escape(key)}["']""", code)]
