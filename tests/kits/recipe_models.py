"""Ten decoders that others wrote, as config.json, and ten recipes for one, two and four ranks."""

import json

BASE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
        "max_position_embeddings": 64, "tie_word_embeddings": False}
GROUPED = {**BASE, "num_key_value_heads": 2}
CONFIGS = {
    "llama": {**GROUPED}, "mistral": {**GROUPED}, "qwen2": {**GROUPED, "tie_word_embeddings": True},
    "qwen3": {**GROUPED, "head_dim": 8}, "gemma2": {**GROUPED, "head_dim": 8, "tie_word_embeddings": True},
    "phi3": {**GROUPED, "pad_token_id": 0}, "olmo2": {**GROUPED},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {**BASE}, "opt": {"vocab_size": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64,
                                  "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 64,
                                  "dropout": 0.0, "pad_token_id": 1}}
RECIPES = [
    {"precision": "bf16"}, {"recompute": "blocks", "micro_batches": 2}, {"activations": "int8"},
    {"optimizer": "sgd", "precision": "autocast"}, {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3, "precision": "bf16", "recompute": "blocks"}, {"tp": 2, "precision": "bf16"},
    {"tp": 2, "pp": 2, "sequence": True, "micro_batches": 2}, {"pp": 2, "dp": 2, "micro_batches": 4,
                                                               "precision": "bf16"},
    {"cp": 2, "dp": 2, "store": "host"}]
OTHERS = {("gemma2", 9): {"dp": 2, "store": "host"}}  # a softcap is refused by ring attention
REFUSED = {("opt", 6): "no plan is known for OPTForCausalLM", ("opt", 7): "no plan is known for OPTForCausalLM"}


def written(folder, kind):
    """Write the config.json of a model, and return its path."""
    path = folder / kind / "config.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    return str(path)
