"""What a token leaves in a cache: the least that a model can have, and what is no count."""

import pytest
import torch

from refimpl.common.cache_bytes import gqa_cache_bytes, mla_cache_bytes


def test_one_of_each_is_enough():
    assert gqa_cache_bytes(layers=1, kv_heads=1, head_dim=1) == 2 * 2  # a key and a value of bf16
    assert gqa_cache_bytes(layers=1, kv_heads=1, head_dim=3, v_dim=1, dtype=torch.float32) == 4 * 4
    assert mla_cache_bytes(layers=1, latent=1, rope=1) == 2 * 2


@pytest.mark.parametrize("wrong", [0, -1, 1.0, True, None])
def test_what_is_no_count_is_named(wrong):
    with pytest.raises(ValueError, match=f"layers={wrong}: expected an int of at least 1"):
        gqa_cache_bytes(layers=wrong, kv_heads=1, head_dim=1)
    with pytest.raises(ValueError, match=f"latent={wrong}: expected an int of at least 1"):
        mla_cache_bytes(layers=1, latent=wrong, rope=1)
