"""Attention of models that others wrote, by one function: Gemma 2 (softcap), gpt-oss (sinks), DeepSeek-V3 (MLA)."""

import outside  # noqa: F401 - before transformers
import pytest
import torch

from refimpl.attention import Softcap, flash_attention, tiled_attention
from refimpl.attention.kv_cache import gqa_cache_bytes, mla_cache_bytes

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64}
MODELS = {
    "Gemma 2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16,
                           "attn_logit_softcapping": 0.5, "sliding_window": 8}),
    "gpt-oss": ("GptOss", {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8, "num_local_experts": 2,
                           "num_experts_per_tok": 1}),
    "DeepSeek-V3": ("DeepseekV3", {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1})}


def made(name):
    """A tiny model with its defaults."""
    import transformers

    torch.manual_seed(0)
    kind, own = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **own, pad_token_id=0, attn_implementation="eager")
    found = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # scores of the order of 1, and sinks that matter
    return found


def by(attention):
    """transformers' interface for attention, with ours behind it."""
    def call(module, query, key, value, mask, scaling=None, sliding_window=None, softcap=None, s_aux=None, **others):
        out = attention(query, key, value, causal=True, scale=scaling,
                        window=None if sliding_window is None else sliding_window - 1, sinks=s_aux,
                        score=None if softcap is None else Softcap(softcap))
        return out.transpose(1, 2).contiguous(), None
    return call


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("name", MODELS)
def test_the_same_loss_and_gradients_as_the_models_own(name, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, tokens = made(name), torch.randint(1, 64, (2, 20))
    def read(which, attention=None):
        if attention:
            monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, which, by(attention))
        model.set_attn_implementation(which)
        model.zero_grad()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected = read("eager")
    for which, attention in (("ours, tiled", tiled_attention), ("ours", flash_attention)):
        torch.testing.assert_close(read(which, attention), expected, rtol=1e-3, atol=1e-5)
    if name != "DeepSeek-V3":  # the mutant leaves the softcap and the sinks out
        wrong = read("ours, plain", lambda *x, sinks, score, **options: tiled_attention(*x, **options))
        assert abs(wrong["loss"] - expected["loss"]) > 1e-3


@pytest.mark.parametrize("name", ["Gemma 2", "DeepSeek-V3"])
def test_a_cache_takes_the_closed_forms_bytes(name):
    model, tokens = made(name), torch.randint(1, 64, (3, 7))
    with torch.no_grad():
        cache = model(tokens, use_cache=True).past_key_values
    held = sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))
    form = {"Gemma 2": gqa_cache_bytes(layers=2, kv_heads=2, head_dim=16, dtype=torch.float32),
            "DeepSeek-V3": mla_cache_bytes(layers=2, latent=24, rope=8, dtype=torch.float32)}[name]
    assert held == form * tokens.numel()
    assert held != gqa_cache_bytes(layers=2, kv_heads=4, head_dim=24, v_dim=12, dtype=torch.float32) * tokens.numel()
