"""What a token leaves in a cache: the papers' figures, and the same attention from latents."""

import pytest
import torch

from refimpl.attention import kv_cache as cache
from refimpl.attention import reference_attention, tiled_attention
from refimpl.attention.kv_cache import DEEPSEEK, HEADS, LAYERS, absorbed, expand, gqa_cache_bytes, mla_cache_bytes


def test_figures_of_the_papers():
    """DeepSeek-V2, table 1: MLA takes what GQA with 2.25 groups would."""
    assert cache.equal_groups(DEEPSEEK.latent, DEEPSEEK.rope, 128) == 2.25
    v3 = mla_cache_bytes(layers=LAYERS["DeepSeek-V3"], latent=DEEPSEEK.latent, rope=DEEPSEEK.rope)
    assert v3 == 61 * 576 * 2 == 70_272
    mha = gqa_cache_bytes(layers=61, kv_heads=HEADS, head_dim=128)
    assert mha == 61 * 2 * 128 * 128 * 2 == 3_997_696 and round(mha / v3, 1) == 56.9
    assert gqa_cache_bytes(layers=80, kv_heads=8, head_dim=128) == 327_680  # Llama-3-70B
    assert gqa_cache_bytes(layers=1, kv_heads=1, head_dim=192, v_dim=128, dtype=torch.float32) == 4 * 320


def test_attention_on_the_latent_is_that_on_keys_and_values():
    B, H, T, S, (L, R, N, V) = 2, 4, 3, 9, (12, 4, 6, 5)
    given = q, c, k_rope, up_k, up_v = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (
        (B, H, T, N + R), (B, S, L), (B, S, R), (H, N, L), (H, V, L))]
    expected = reference_attention(q, *expand(c, k_rope, up_k, up_v), causal=True)
    for attention in (reference_attention, tiled_attention):
        both = absorbed(attention, *given, causal=True), expected
        torch.testing.assert_close(*both)
        torch.testing.assert_close(*(torch.autograd.grad(x.sin().sum(), given, retain_graph=True) for x in both))


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"kv_heads": 2.0}, {"head_dim": -1}, {"v_dim": 0}])
def test_counts_that_are_none(wrong):
    (name, value), = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}: expected an int of at least 1"):
        gqa_cache_bytes(**{"layers": 2, "kv_heads": 2, "head_dim": 8} | wrong)
    with pytest.raises(ValueError, match="rope=0"):
        mla_cache_bytes(layers=2, latent=8, rope=0)
