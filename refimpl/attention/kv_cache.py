"""What a token leaves in the cache: keys and values of each head (MHA), of groups of heads (GQA), or one latent (MLA).

A model that writes text computes each token once and keeps what later tokens attend to. Of one token that takes

    MHA    layers · 2 · H · D · e            a key and a value for each of H heads
    GQA    layers · 2 · G · D · e            for each of G groups of heads, G = H / (heads in a group); MQA: G = 1
    MLA    layers · (L + R) · e              a latent c of width L for all heads, and a rotated key of width R

with e bytes an element. In MLA the keys and values of head h are products of the one latent, k = W_h c and v = U_h c,
so that the latent is kept in their place. A product with a matrix loses the position (R(i) W does not commute), so R
columns of the key, which all heads share, are rotated and kept apart: each head's q and k have D = N + R columns (N of
the latent, R of the position) and its v has V, as many as the model likes. That is why D ≠ V in training.

Attention can even be computed on the latent itself (`absorbed`): q · (W_h c) = (W_hᵀ q) · c. Then MLA is attention with
one key head of width L + R and values of width L, H queries for each key.

GQA: Ainslie et al. 2023; MQA: Shazeer 2019; MLA: DeepSeek-V2 (DeepSeek-AI 2024), section 2.1 and table 1.
"""

from typing import NamedTuple

import torch

from ..common.cache_bytes import check_counts, gqa_cache_bytes, mla_cache_bytes

__all__ = ["DEEPSEEK", "HEADS", "LAYERS", "Latent", "absorbed", "equal_groups", "expand", "gqa_cache_bytes",
           "mla_cache_bytes"]


class Latent(NamedTuple):
    """The widths of multi-head latent attention: of the latent (kv_lora_rank), of the rotated key (qk_rope_head_dim),
    and for a head those of the rest of its key (qk_nope_head_dim) and of its value (v_head_dim)."""

    latent: int
    rope: int
    nope: int
    v: int


# Both models: DeepSeek-V2 (arXiv:2405.04434), section 3.1.2; DeepSeek-V3 (arXiv:2412.19437), section 4.2.
DEEPSEEK = Latent(latent=512, rope=64, nope=128, v=128)
LAYERS = {"DeepSeek-V2": 60, "DeepSeek-V3": 61}
HEADS = 128


def equal_groups(latent, rope, head_dim):
    """Return the number of key heads with which GQA would take as much as MLA: (latent + rope) / (2 · head_dim); 2.25
    for DeepSeek's."""
    check_counts(latent=latent, rope=rope, head_dim=head_dim)
    return (latent + rope) / (2 * head_dim)


def expand(c_BSL, k_rope_BSR, up_k_HNL, up_v_HVL):
    """Return (k_BHSD, v_BHSV) of a cache of latents: what attention in training is given, D = N + R."""
    k_BHSN, v_BHSV = (torch.einsum("bsl,hnl->bhsn", c_BSL, up) for up in (up_k_HNL, up_v_HVL))
    rope_BHSR = k_rope_BSR[:, None].expand(-1, k_BHSN.shape[1], -1, -1)
    return torch.cat([k_BHSN, rope_BHSR], dim=-1), v_BHSV


def absorbed(attention, q_BHTD, c_BSL, k_rope_BSR, up_k_HNL, up_v_HVL, **options):
    """Compute MLA's attention on the cache itself: no key and no value of a head is ever made. Returns (B, H, T, V).

    q's N columns are multiplied by W_hᵀ and are as wide as the latent then; the latent is key and value at once, and
    what comes out is multiplied by U_h. `attention`: one that takes v of another width than q (`options` are its own),
    here with D = L + R, V = L, and one key head. The scale is still that of N + R columns.
    """
    N = up_k_HNL.shape[1]
    q_BHTL = torch.einsum("bhtn,hnl->bhtl", q_BHTD[..., :N], up_k_HNL)
    keys_B1SE = torch.cat([c_BSL, k_rope_BSR], dim=-1)[:, None]
    out_BHTL = attention(torch.cat([q_BHTL, q_BHTD[..., N:]], dim=-1), keys_B1SE, c_BSL[:, None],
                         **{"scale": q_BHTD.shape[-1] ** -0.5} | options)
    return torch.einsum("bhtl,hvl->bhtv", out_BHTL, up_v_HVL)
