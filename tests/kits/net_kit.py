"""Decoders that the installed transformers can build, on the meta device, as their configs say by default."""

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

LLAMA = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
         "intermediate_size": 128}
# What a config lacks by default, and its class needs.
NEEDED = {"hunyuan_v1_dense": {"head_dim": 128}, "hunyuan_v1_moe": {"head_dim": 128}, "ministral": {"head_dim": 128},
          "deepseek_v2": {"num_experts_per_tok": 6}, "nemotron": {"num_key_value_heads": 8},
          "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2}}


def on_meta(kind, **settings):
    """Return the causal language model of this type, as large as its config says."""
    config = AutoConfig.for_model(kind, **{**NEEDED.get(kind, {}), **settings})
    with torch.device("meta"):
        return getattr(transformers, CLASSES[kind])(config)
