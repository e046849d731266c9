"""Activations in closed form: what autograd keeps of our GPT until backward.

Symbols, as in "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022): s sequence,
b batch, h hidden, a heads, L layers, v vocabulary; and ours: g key/value heads, d head_dim (h = ad, unless the config
gives another), f MLP hidden, e bytes per element.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..config import GPTConfig


@dataclass(frozen=True)
class KeptByKernels:
    """What the kernels of a device keep, where devices differ. Bytes per element; e is that of the activations."""

    mask: int  # dropout: CPU keeps the noise it multiplied with (e), CUDA a boolean (1)
    statistics: int  # LayerNorm's mean and 1/σ: e on CPU, fp32 or wider on CUDA
    fused_rms: bool  # RMSNorm in one kernel keeps its input and 1/σ; in pieces also the fp32 input and x/σ
    softmax: int  # tensors as large as the scores at once in softmax's backward: two gradients; CUDA also their product


def kept_on(device, element):
    """Return what `device`, "cpu" or "cuda", keeps for activations of `element` bytes. ValueError for another."""
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r}: what its kernels keep is not known here; expected 'cpu' or 'cuda'")
    if kind == "cuda":
        return KeptByKernels(mask=1, statistics=max(4, element), fused_rms=True, softmax=3)
    return KeptByKernels(mask=element, statistics=element, fused_rms=False, softmax=2)


def check_sizes(batch, sequence, dtype=torch.float32):
    """Raise ValueError for what cannot be the shape and type of activations."""
    for name, size in (("batch", batch), ("sequence", sequence)):
        if type(size) is not int or size < 1:
            raise ValueError(f"{name}={size!r}: expected an integer of at least 1")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: expected that of the activations, such as torch.bfloat16")


def block_terms(config: "GPTConfig", batch: int, sequence: int, dtype: torch.dtype = torch.float32,
                device: torch.device | str = "cpu") -> dict[str, int]:
    """Predict the bytes that one block keeps for backward, with the dense attention of `refimpl.model`: {term: bytes}.

        e·sb·(2h + h + (ad + 2gd) + ad + h + 2f) + e·abs² + (a/g)·s² + statistics        GELU, no dropout

    with 2f more for a gate and 2h more for `post_norms`; plus, with dropout, m·(2sbh + abs²) of masks (m bytes each)
    and e·abs² of what the softmax's dropout gave. Terms carry Korthikanti's names (section 4.1), so that the two can
    stand side by side. ValueError for a batch or sequence that is no positive integer, a dtype that is not floating,
    and another device than "cpu" and "cuda".
    """
    check_sizes(batch, sequence, dtype)
    s, b, h, a, g, f = sequence, batch, config.hidden, config.heads, config.kv_heads, config.mlp_hidden
    q, kv = config.q_hidden, config.kv_hidden
    e, kept = dtype.itemsize, kept_on(device, dtype.itemsize)
    token, score, dropped = s * b, a * b * s * s, config.dropout > 0
    terms = norm_terms(config, config.norms * token, e, kept)
    terms["qkv input"] = e * token * h
    terms["queries and keys"] = e * token * (q + kv)
    terms["values"] = e * token * kv
    terms["causal mask"] = a // g * s * s  # booleans, one for the heads of a group: they are rows of one matrix
    terms["softmax output"] = e * score
    terms["softmax dropout mask"] = kept.mask * score * dropped
    terms["softmax dropout output"] = e * score * dropped
    terms["projection input"] = e * token * q
    terms["attention dropout mask"] = kept.mask * token * h * dropped
    terms["MLP input"] = e * token * h
    function = "SiLU" if config.activation == "swiglu" else "GELU"
    terms[f"{function} input"] = e * token * f
    if config.gated:
        terms[f"{function} output"] = terms["up output"] = e * token * f
    terms["down input"] = e * token * f
    terms["MLP dropout mask"] = kept.mask * token * h * dropped
    copied = config.norm == "rmsnorm" and not kept.fused_rms and e < 4  # to fp32, by each norm for itself
    if config.parallel_residual and not copied:  # the first norms of both branches read the same x
        terms["norm inputs"] -= terms["norm inputs"] // config.norms
    return {name: nbytes for name, nbytes in terms.items() if nbytes}


def norm_terms(config, tokens, e, kept):
    """Predict what norms over `tokens` vectors of h keep besides their output (which is the next matmul's input)."""
    h = config.hidden
    if config.norm == "layernorm":
        return {"norm inputs": e * tokens * h, "norm statistics": 2 * kept.statistics * tokens}
    wide = max(4, e)  # a kernel reckons 1/σ in fp32 or wider
    if kept.fused_rms:
        return {"norm inputs": e * tokens * h, "norm statistics": wide * tokens}
    # In pieces: x in fp32 or wider (x itself if it is), 1/σ, and x/σ before the gain.
    return {"norm inputs": wide * tokens * h, "norm statistics": wide * tokens, "RMSNorm x/σ": wide * tokens * h}


def activation_terms(config: "GPTConfig", batch: int, sequence: int, dtype: torch.dtype = torch.float32,
                     device: torch.device | str = "cpu") -> dict[str, int]:
    """Predict the bytes that the whole GPT keeps, given targets: {term: bytes}; `blocks` is L times one block.

    Outside the blocks: the positions (rotary: their cos and sin), the embedding's dropout, the last norm, the head's
    input, and 4·sbv for the log-probabilities, which are fp32 in any precision. Tokens and targets are inputs; but the
    loss takes int64 alone, and of int32 targets it keeps a copy, 8·sb bytes more. (One token alone, s = b = 1, keeps up
    to 2eh more in a block: its q, k and v stay views of one matrix.) ValueError as in `block_terms`.
    """
    check_sizes(batch, sequence, dtype)
    s, token, h, e = sequence, sequence * batch, config.hidden, dtype.itemsize
    kept = kept_on(device, e)
    block = block_terms(config, batch, sequence, dtype, device)
    last = norm_terms(config, token, e, kept)
    terms = {"blocks": config.layers * sum(block.values())}
    if config.positions == "learned":
        terms["positions"] = 8 * s
    else:
        terms["rotation"] = 2 * e * s * config.rotary_dim
    if config.dropout:
        terms["embedding dropout mask"] = kept.mask * token * h
    terms["last norm"] = sum(last.values())
    terms["head input"] = e * token * h
    terms["log-probabilities"] = 4 * token * config.vocab_size  # for backward: its gradient is softmax − one-hot
    terms["loss weight"] = 4  # what the mean was divided by
    return terms


def activation_bytes(config: "GPTConfig", batch: int, sequence: int, dtype: torch.dtype = torch.float32,
                     device: torch.device | str = "cpu") -> int:
    """Predict the bytes (int) of all activations of one forward of our GPT, given targets.

    It is the sum of `activation_terms`, which has the equation, and takes and raises the same. `batch` × `sequence`
    tokens; `dtype` is that of the weights.
    """
    return sum(activation_terms(config, batch, sequence, dtype, device).values())


def korthikanti_terms(config: "GPTConfig", batch: int, sequence: int) -> dict[str, int]:
    """Return `korthikanti_bytes` term by term, as section 4.1 of the paper counts them: {term: bytes}.

    16-bit numbers, GELU, dropout masks of a byte. Norms' statistics and the causal mask are left out as small;
    `block_terms` has them. ValueError as there.
    """
    check_sizes(batch, sequence)
    token_h, score = sequence * batch * config.hidden, config.heads * batch * sequence**2
    per_token = {"norm inputs": 4, "qkv input": 2, "queries and keys": 4, "values": 2, "projection input": 2,
                 "attention dropout mask": 1, "MLP input": 2, "GELU input": 8, "down input": 8, "MLP dropout mask": 1}
    per_score = {"softmax output": 2, "softmax dropout mask": 1, "softmax dropout output": 2}
    return {**{k: n * token_h for k, n in per_token.items()}, **{k: n * score for k, n in per_score.items()}}


def korthikanti_bytes(config: "GPTConfig", batch: int, sequence: int) -> int:
    """Return the bytes (int) of one block's activations by the paper: sbh · (34 + 5as/h).

    s = `sequence`, b = `batch`, h and a the config's hidden size and heads; 16-bit numbers, dropout masks of a byte.
    "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022), equation 1. ValueError
    for sizes that are not integers of at least 1.
    """
    check_sizes(batch, sequence)
    s, b, h, a = sequence, batch, config.hidden, config.heads
    return 34 * s * b * h + 5 * a * b * s * s
