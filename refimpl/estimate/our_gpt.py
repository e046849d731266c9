"""Our GPT of a `config.json` of Hugging Face, for who has no transformers: GPT-2, Llama, Mistral, Qwen 2."""

import re

from ..model import GPTConfig
from ..untrusted.text import shown

LLAMA = {"vocab_size": "vocab_size", "max_position_embeddings": "context_length", "num_hidden_layers": "layers",
         "hidden_size": "hidden", "num_attention_heads": "heads", "intermediate_size": "mlp_hidden",
         "num_key_value_heads": "kv_heads", "head_dim": "head_dim", "rms_norm_eps": "norm_eps",
         "rope_theta": "rotary_base", "tie_word_embeddings": "tied"}
GPT2 = {"vocab_size": "vocab_size", "n_positions": "context_length", "n_layer": "layers", "n_embd": "hidden",
        "n_head": "heads", "n_inner": "mlp_hidden", "layer_norm_epsilon": "norm_eps", "tie_word_embeddings": "tied"}
REQUIRED = {"vocab_size", "context_length", "layers", "hidden", "heads"}  # what nobody can assume
AS_LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rotary", "bias": False}
FAMILIES = {"llama": (LLAMA, AS_LLAMA), "mistral": (LLAMA, AS_LLAMA), "qwen2": (LLAMA, {**AS_LLAMA, "qkv_bias": True}),
            "gpt2": (GPT2, {})}
TIED = {"gpt2"}  # that tie the head to the embedding unless they say otherwise
# What has to have one of these values to be built here, and what changes no tensor of a step.
ONLY = {"hidden_act": ("silu",), "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu"),
        "attention_bias": (False,), "mlp_bias": (False,), "add_cross_attention": (False,),
        "use_sliding_window": (False,)}
SAME = {"sliding_window", "max_window_layers", "layer_types", "rope_scaling", "rope_parameters", "n_ctx",
        "scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "summary_activation",
        "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"}
DROPOUTS = ("embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout")


def config_of(path, config, harmless):
    """Return (GPTConfig, sentences about what was assumed) of a config.json.

    `harmless`: keys that say nothing of its tensors. ValueError for another family, for a size that is missing, and for
    what our GPT does not have.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise ValueError(f"{path}: model_type={shown(kind)}: our GPT stands in for {', '.join(FAMILIES)}; install "
                         "transformers for others")
    names, fixed = FAMILIES[kind]
    for key, values in ONLY.items():
        if config.get(key, values[0]) not in values:
            raise ValueError(f"{path}: {key}={shown(config[key])}: our GPT has {' or '.join(map(repr, values))} alone; "
                             "install transformers")
    missing = [key for key, name in names.items() if name in REQUIRED and config.get(key) is None]
    if missing:
        raise ValueError(f"{path}: {', '.join(missing)} of a {kind} is missing: add it")
    fields = {name: config[key] for key, name in names.items() if config.get(key) is not None}
    assumed = _assumed(kind, names, config, harmless)
    fields.setdefault("tied", kind in TIED)
    fields["dropout"], said = _dropout(path, kind, config)
    try:
        return GPTConfig(**{**fixed, **fields}), assumed + said
    except (TypeError, ValueError) as error:
        meant = [f"{key}={shown(config[key])}, " for key, name in names.items()
                 if config.get(key) is not None and re.search(rf"\b{name}=", str(error))]
        raise ValueError(f"{path}: {''.join(meant)}{error}") from error


def _assumed(kind, names, config, harmless):
    said = [f"{key} is not given: assumed {getattr(GPTConfig, name)}"
            for key, name in names.items() if config.get(key) is None and name in ("norm_eps", "rotary_base")]
    known = {*names, *ONLY, *SAME, *DROPOUTS, *harmless}
    said += [f"{key}={shown(config[key])} is unknown here: assumed to change nothing" for key in config
             if key not in known]
    if kind == "mistral" and config.get("sliding_window"):
        said.append(f"sliding_window={config['sliding_window']} is not built: attention sees all tokens; that changes "
                    "the size of a mask alone")
    return said


def _dropout(path, kind, config):
    """Return (dropout, sentences). Ours is one number, of all places."""
    assumed = 0.1 if kind == "gpt2" else 0.0
    places = DROPOUTS[:3] if kind == "gpt2" else DROPOUTS[3:]
    given = {place: config.get(place, assumed) for place in places}
    for place, value in given.items():
        if type(value) not in (int, float) or not 0 <= value < 1:
            raise ValueError(f"{path}: {place}={shown(value)}: expected a share from 0 to below 1")
    if len({value > 0 for value in given.values()}) > 1 or (kind != "gpt2" and any(given.values())):
        said = ", ".join(f"{place}={value}" for place, value in given.items())
        raise ValueError(f"{path}: {said}: our GPT has dropout in all places or in none; install transformers, or set "
                         "them to 0.0")
    said = [f"{place} is not given: assumed {assumed}, as in transformers" for place in places
            if place not in config and assumed]
    return max(given.values()), said
