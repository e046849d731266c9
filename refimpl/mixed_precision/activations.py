"""Activations under autocast, in closed form: what autograd keeps of our GPT, and the casts of weights among it.

Autocast leaves the residual stream in fp32, since embeddings are looked up in fp32 and fp32 + 16 bits is fp32. So the
norms keep fp32 inputs; the matrix products keep 16-bit ones, and 16-bit casts of their weights until backward. Symbols
as in `block_terms`: s sequence, b batch, h hidden, a heads, g key/value heads, f MLP hidden, L layers,
v vocabulary, e bytes of the low dtype.
"""

from typing import TYPE_CHECKING

import torch

from ..common.activation_bytes import activation_terms, block_terms
from .internals.support import check_dtype

if TYPE_CHECKING:
    from ..config import GPTConfig

NORMS = ("norm inputs", "norm statistics", "RMSNorm x/σ")


def weight_cast_bytes(config: "GPTConfig", dtype: torch.dtype = torch.bfloat16, biases: bool = True) -> int:
    """Predict the bytes (int) of 16-bit copies of weights in a region after one forward: each linear layer's, once.

        e · (L·(h·(q + 2k) + q·h + n·h·f + f·h) + v·h) + e · L·(q + 2k + 2h + n·f)     weights, then biases

    with q and k the features of all query heads and of all key heads, n = 2 for a gated MLP, else 1; no biases where
    `config.bias` is False. Autograd keeps them until backward, except those of the biases, which backward does not
    need: `biases=False` leaves them out. ValueError for another dtype than bfloat16 or float16.
    """
    check_dtype(dtype)
    h, f, q, kv, n = config.hidden, config.mlp_hidden, config.q_hidden, config.kv_hidden, 1 + config.gated
    weights = config.layers * (h * (q + 2 * kv) + q * h + n * h * f + f * h) + config.vocab_size * h
    if biases:
        weights += config.layers * (config.has_qkv_bias * (q + 2 * kv) + config.bias * (h + n * f + h))
    return dtype.itemsize * weights


def autocast_activation_terms(config: "GPTConfig", batch: int, sequence: int, dtype: torch.dtype = torch.bfloat16,
                              device: torch.device | str = "cpu") -> dict[str, int]:
    """Predict the bytes that autograd keeps of a forward with targets under `autocast(dtype)`: {term: bytes}.

    `batch` rows (b) of `sequence` tokens (s). Per block, GELU, no dropout, on a CPU:

        4·(2·sbh + 4·sb) + e·sb·(4h + 2hg/a + 2f) + e·abs² + (a/g)·s²

    The first bracket holds the norms' inputs and statistics, which stay fp32; in a model that is 16-bit throughout it
    would be multiplied by e as well. With a gate, x is cast twice, for the gate and for the up projection (only casts
    of weights are cached), e·sbh more. On CUDA the softmax runs in fp32, and its output is kept in fp32 and as a 16-bit
    cast: 4·abs² + e·abs². ValueError for another dtype than bfloat16 or float16, for `post_norms`, and as in
    `block_terms`.
    """
    check_dtype(dtype)
    if config.post_norms:
        raise ValueError("post_norms=True: this closed form covers norms of the residual stream alone, which is fp32; "
                         "use memory.dry_run")
    low, high = (block_terms(config, batch, sequence, each, device) for each in (dtype, torch.float32))
    block = {**low, **{name: high[name] for name in NORMS if name in high}}
    if config.gated:
        block["MLP input"] *= 2
    if torch.device(device).type == "cuda":
        block["softmax output"] = high["softmax output"]
        block.pop("softmax dropout output", None)
        block["softmax cast"] = low["softmax output"]
    outside = activation_terms(config, batch, sequence, torch.float32, device)
    outside["head input"] = dtype.itemsize * batch * sequence * config.hidden
    return {**outside, "blocks": config.layers * sum(block.values()),
            "weight casts": weight_cast_bytes(config, dtype, biases=False)}


def autocast_activation_bytes(config: "GPTConfig", batch: int, sequence: int, dtype: torch.dtype = torch.bfloat16,
                              device: torch.device | str = "cpu") -> int:
    """Predict the bytes (int) that autograd keeps of our GPT's forward, with targets, under `autocast(dtype)`.

    It is the sum of `autocast_activation_terms`, which has the equation, and takes and raises the same. `batch` ×
    `sequence` tokens. The bytes of the casts of weights are in it.
    """
    return sum(autocast_activation_terms(config, batch, sequence, dtype, device).values())
