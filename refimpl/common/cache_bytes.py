"""What a token leaves in the cache of a model, in bytes: keys and values of its heads, or one latent."""

import torch


def gqa_cache_bytes(*, layers, kv_heads, head_dim, v_dim=None, dtype=torch.bfloat16):
    """Return the bytes that a token leaves in a cache of keys and values: layers · kv_heads · (head_dim + v_dim) · e.

    With `kv_heads` = heads that is MHA, with 1 MQA. `v_dim`: by default head_dim. Raises ValueError for a count that is
    not positive.
    """
    v_dim = head_dim if v_dim is None else v_dim
    check_counts(layers=layers, kv_heads=kv_heads, head_dim=head_dim, v_dim=v_dim)
    return layers * kv_heads * (head_dim + v_dim) * dtype.itemsize


def mla_cache_bytes(*, layers, latent, rope, dtype=torch.bfloat16):
    """Return the bytes that a token leaves in the cache of multi-head latent attention: layers · (latent + rope) · e,
    whatever the number of heads. Raises ValueError for a count that is not positive."""
    check_counts(layers=layers, latent=latent, rope=rope)
    return layers * (latent + rope) * dtype.itemsize


def check_counts(**counts):
    """Raise ValueError for a count that is not positive."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(f"{name}={count!r}: expected an int of at least 1")
