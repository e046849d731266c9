"""Attention by its definition, in fp32 or wider, with every matrix in memory: the oracle for all that follows.

    S = scale · Q Kᵀ,  −∞ where a query does not see a key      (T, S) per head
    P = softmax(S),  row by row;  0 in a row that sees nothing
    O = (Z ∘ P) V / (1 − p)                                     Z = 0 where dropout takes a weight, else 1

Between S and P a hook may change each score (`scores.py`), and a learned sink may be one more column of the softmax.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .call.arguments import resolve, without_autocast
from .call.philox import dropped, dropped_bytes, runs_of
from .call.sequence_tiles import SequenceTiles

if TYPE_CHECKING:
    from .scores import ScoreHook


def reference_attention(q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, *, causal: bool = False,
                        window: int | None = None, scale: float | None = None, dropout_p: float = 0.0,
                        seed: int | None = None, cu_seqlens: torch.Tensor | None = None,
                        cu_seqlens_k: torch.Tensor | None = None, max_seqlen: int | None = None,
                        max_seqlen_k: int | None = None, score: "ScoreHook | None" = None,
                        sinks: torch.Tensor | None = None, return_logsumexp: bool = False) -> Any:
    """Compute softmax(scale · q kᵀ) v with the whole matrix in memory; it can be differentiated any number of times.

    Returns (B, H, T, V) in q's dtype, V being v's head_dim. The arithmetic is in fp32 (fp64 for fp64), under autocast
    too.

    - G divides H: query heads h·H/G … (h+1)·H/G − 1 share key head h.
    - `causal`: query i sees keys j ≤ i + S − T, so that the last query sees every key.
    - `window`: it sees keys at most that many positions away, to the left if causal, else on both sides
      (flash-attention's window_size = (window, 0) and (window, window)).
    - `scale`: default 1/√D.
    - `dropout_p`: each weight is dropped with this probability and the rest grow by 1/(1 − p). The mask follows from
      `seed` alone (an int, or an int64 on the device; by default drawn from PyTorch's generator): see `call/philox.py`.
    - `cu_seqlens`: several sequences packed one after the other in a batch of 1: 0 and where each one ends, an int32
      tensor or a list; a query sees keys of its own sequence only. `cu_seqlens_k`: for the keys, if they differ.
      `max_seqlen`, `max_seqlen_k`: no sequence is longer (`flash_attention` needs to know it, or waits).
    - `score`: a hook, or a list of hooks: softcap, ALiBi, documents, prefix LM; see `scores.py`.
    - `sinks`: (H,), the learned logit of a key without a value, for each query head; it counts in the logsumexp.
    - `return_logsumexp`: (out, lse_BHT), lse = ln Σ exp(scale · q kᵀ) over the keys seen, natural, fp32 or wider.

    A query that sees no key gives zeros (lse −∞, or its sink) and zero gradients; with a hook a score of −∞ counts as a
    key that is not seen. A NaN or inf in a key spreads as in softmax, to
    the rows that see it; in v it may also reach rows that do not see it, since 0 · NaN is NaN. Raises TypeError or
    ValueError for arguments that do not fit. Equation 1 of "Attention Is All You Need" (Vaswani et al. 2017).
    """
    call = resolve(q_BHTD, k_BGSD, v_BGSV, causal=causal, window=window, scale=scale, dropout_p=dropout_p, seed=seed,
                   cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, max_seqlen=max_seqlen, max_seqlen_k=max_seqlen_k,
                   score=score, sinks=sinks)
    with without_autocast(q_BHTD.device):
        out_BHTV, lse_BHT = _definition(q_BHTD, k_BGSD, v_BGSV, call, sinks, return_logsumexp)
    return (out_BHTV, lse_BHT) if return_logsumexp else out_BHTV


def _definition(q_BHTD, k_BGSD, v_BGSV, call, sinks_H, with_lse):
    (B, H, T, _), (G, S, V), wide = q_BHTD.shape, v_BGSV.shape[1:], wide_dtype(q_BHTD.dtype)
    drops = call.seed is not None
    dropped_BHTS = dropped(call.seed, call.dropout_p, B, H, (0, T), (0, S), q_BHTD.device) if drops else None
    # 16-bit scores would round before the softmax
    scores_BHTS, masked = _scores(q_BHTD.to(wide), k_BGSD.to(wide), call, sinks_H)
    lse_BHT = scores_BHTS.logsumexp(dim=-1) if with_lse else None
    weights_BHTS = scores_BHTS.softmax(dim=-1)[..., :S]  # without the sink's
    del scores_BHTS  # else one more T × S matrix while O is computed
    if drops:
        weights_BHTS = weights_BHTS.masked_fill(dropped_BHTS, 0)
    out_BHTV = (weights_BHTS.reshape(B, G, H // G * T, S) @ v_BGSV.to(wide)).view(B, H, T, V)
    if drops:
        out_BHTV = out_BHTV / (1 - call.dropout_p)
    if masked is not None:
        out_BHTV = out_BHTV.masked_fill(masked, 0)
        lse_BHT = lse_BHT.masked_fill(masked[..., 0], -math.inf) if with_lse else None
    return out_BHTV.to(q_BHTD.dtype), lse_BHT


def _scores(q_BHTD, k_BGSD, call, sinks_H):
    """Return the scores S, with a column more for sinks, and where a row sees no key at all, (T, 1) or (B, H, T, 1);
    None if none. Such a row gets zeros, so that its softmax, which is not used, is finite."""
    (B, H, T, D), (G, S) = q_BHTD.shape, k_BGSD.shape[1:3]
    mask_TS, masked = _masks(call, T, S, q_BHTD.device)
    rows_BGRD = q_BHTD.reshape(B, G, H // G * T, D)  # the heads of a group become rows of one matrix
    scores_BHTS = call.scale * (rows_BGRD @ k_BGSD.mT).view(B, H, T, S)
    if call.score is not None:
        scores_BHTS = call.score.forward(scores_BHTS, *_all_places(call, (B, H), q_BHTD.device))
    if mask_TS is not None:
        scores_BHTS = scores_BHTS.masked_fill(mask_TS, -math.inf)
    if sinks_H is not None:
        sinks_BHT1 = sinks_H.to(scores_BHTS.dtype).view(H, 1, 1).expand(B, H, T, 1)
        return torch.cat([scores_BHTS, sinks_BHT1], dim=-1), None  # a sink is always seen: no row is without a key
    if call.score is not None:
        masked = (scores_BHTS == -math.inf).all(dim=-1, keepdim=True)
    return (scores_BHTS, None) if masked is None else (scores_BHTS.masked_fill(masked, 0), masked)


def _all_places(call, heads, device):
    """Return (b, h, q_idx, k_idx) of the whole matrix. Pairs of two packed sequences are masked, wherever they are."""
    parts = [SequenceTiles(call, i, heads, device).places((0, part.band.T), (0, part.band.S))
             for i, part in enumerate(call.sequences)]
    if len(parts) == 1:
        return parts[0]
    b = torch.cat([b.view(1, 1).expand(len(q_idx), 1) for b, _, q_idx, _ in parts])
    return b, parts[0][1], torch.cat([q_idx for _, _, q_idx, _ in parts]), torch.cat([k_idx for *_, k_idx in parts])


def _masks(call, T, S, device):
    """Return (mask_TS, fully_masked_T1): True where a query does not see a key, and where it sees no key at all. Each
    is None if it would be False everywhere."""
    if len(call.sequences) == 1:
        mask_TS = call.sequences[0].band.mask((0, T), (0, S), device)
    else:
        mask_TS = torch.ones(T, S, dtype=torch.bool, device=device)
        for queries, keys, band in call.sequences:
            own = band.mask((0, band.T), (0, band.S), device)
            mask_TS[slice(*queries), slice(*keys)] = False if own is None else own
    some = any(sequence.band.fully_masked for sequence in call.sequences)
    return mask_TS, mask_TS.all(dim=-1, keepdim=True) if some else None


def wide_dtype(dtype):
    """Return the dtype in which attention of `dtype` is computed: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


# --- FLOPs and bytes -------------------------------------------------------------------------------------------------


class AttentionFlops(NamedTuple):
    """FLOPs of attention's matrix products; a multiply-add counts 2.

    `pairs`: (query, key) pairs that are not masked, over batch and heads. `backward` has P in memory;
    `backward_recomputing` computes P again from Q and K.
    """

    pairs: int
    forward: int
    backward: int
    backward_recomputing: int


def attention_flops(q_shape: Sequence[int], k_shape: Sequence[int], *, v_dim: int | None = None, causal: bool = False,
                    window: int | None = None, cu_seqlens: torch.Tensor | None = None,
                    cu_seqlens_k: torch.Tensor | None = None) -> AttentionFlops:
    """Count the AttentionFlops of shapes (B, H, T, D) and (B, G, S, D): the least that any method needs, without masked
    pairs. V: head_dim of v (`v_dim`, by default D).

        forward                2 products, Q Kᵀ and P V:                 2 · (D + V) · pairs
        backward               4 products: dV, dP, dQ, dK:               4 · (D + V) · pairs
        backward_recomputing   one more, Q Kᵀ:                           (6 D + 4 V) · pairs

    FlashAttention-2 (Dao 2023), section 4.1 and appendix, counts likewise. Raises as `reference_attention` does.
    """
    call, _ = resolve_shapes(q_shape, k_shape, torch.float32, v_dim=v_dim,  # pairs do not depend on the dtype
                             causal=causal, window=window, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    (B, H, _, D), V = q_shape, v_dim or q_shape[3]
    pairs = B * H * sum(sequence.band.pairs() for sequence in call.sequences)
    return AttentionFlops(pairs, 2 * (D + V) * pairs, 4 * (D + V) * pairs, (6 * D + 4 * V) * pairs)


def resolve_shapes(q_shape, k_shape, dtype, *, v_dim=None, causal=False, window=None, dropout_p=0.0, cu_seqlens=None,
                   cu_seqlens_k=None):
    """Resolve a call from shapes alone, with the checks of a real one. Returns (AttentionCall, (e, w)): e bytes for
    an element, w for an element of `wide_dtype`."""
    q, k = (torch.empty(tuple(shape), dtype=dtype, device="meta") for shape in (q_shape, k_shape))
    v = k if v_dim is None else k.new_empty((*k.shape[:3], v_dim))
    call = resolve(q, k, v, causal=causal, window=window, scale=None, dropout_p=dropout_p, seed=0,
                   cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    return call, (dtype.itemsize, wide_dtype(dtype).itemsize)


class AttentionBytes(NamedTuple):
    """Bytes above q, k and v. `kept`: after the forward, with the output. `peak`: the most during a forward and a
    backward, with the output still held; the gradient that backward is given is not counted."""

    kept: int
    peak: int


def reference_attention_bytes(q_shape: Sequence[int], k_shape: Sequence[int], dtype: torch.dtype = torch.float32, *,
                              causal: bool = False, window: int | None = None, dropout_p: float = 0.0,
                              device: torch.device | str = "cpu") -> AttentionBytes:
    """Predict the AttentionBytes of `reference_attention` for shapes (B, H, T, D) and (B, G, S, D). With N = BHTS, Q =
    BHTD, K = BGSD elements, e bytes an element and w a wide one (4, or 8 for fp64):

        kept   e·Q + w·N                      the output; P
               + TS (+ T)                     booleans, if pairs are masked (and rows fully masked)
               + w·(Q + 2K)                   q, k and v in fp32, if they were 16-bit
               + (w + 1)·N                    Z ∘ P and Z, with dropout
        peak   3w·N + e·(Q + K) + …           P, dP and dS; with dropout P, Z ∘ P, Z and dP, or Philox at work
               + w·N                          P ∘ dP, inside CUDA's kernel for softmax's backward (`device`)

    so the slope in the sequence length is 2. Exact for contiguous q and k where the matrix outweighs the rest (S ≥ 4D),
    with an int seed (a drawn one takes 24 bytes). Raises as `reference_attention` does.
    """
    call, (e, w) = resolve_shapes(q_shape, k_shape, dtype, causal=causal, window=window, dropout_p=dropout_p)
    (B, H, T, D), (G, S) = q_shape, k_shape[1:3]
    N, Q, K, band = B * H * T * S, B * H * T * D, B * G * S * D, call.sequences[0].band
    masks = T * S * (band.pairs() < T * S) + T * (band.fully_masked > 0)
    cast, mask = w * (w != e), 4 * B * H * T * runs_of((0, S))  # Z is drawn four columns at a time
    kept = e * Q + w * N + masks + cast * (Q + 2 * K)
    of_softmax = (3 + (torch.device(device).type == "cuda")) * w * N + e * (Q + K) + cast * (Q + K) + masks
    if not dropout_p:
        return AttentionBytes(kept, of_softmax)
    kept += w * N + mask
    return AttentionBytes(kept, max(kept + w * (N + Q + K), of_softmax + mask, dropped_bytes(B, H, (0, T), (0, S))))
