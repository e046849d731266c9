"""FlashAttention in readable PyTorch: softmax tile by tile, so that no T × S matrix ever exists.

A tile of queries is held while tiles of keys pass. Three running values per row make the softmax "online":

    m' = max(m, rowmax(S))                  the largest score so far
    l' = e^(m − m') · l + rowsum(e^(S − m'))        the sum of exponentials, rescaled to it
    O' = e^(m − m') · O + e^(S − m') V              the output, not yet divided

and at the end O / l is the output and L = m + ln l the logsumexp. Backward computes P = e^(S − L) again from q, k, L:

    Δ = rowsum(dO ∘ O)       dP = dO Vᵀ       dS = P ∘ (dP − Δ)
    dV = Pᵀ dO               dK = dSᵀ Q       dQ = dS K

Milakov & Gimelshein 2018, algorithm 3, has the online sum; FlashAttention (Dao et al. 2022), algorithms 1, 2 and 4, the
tiles and the backward; FlashAttention-2 (Dao 2023), section 3.1, the order of loops and the one logsumexp per row.
"""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..common.derivatives import refuse_batched_gradients, refuse_transforms
from .call.arguments import INSTEAD, refuse_second_derivative, resolve, without_autocast
from .call.dry_tiles import in_tiles
from .call.philox import dropped_bytes, runs_of
from .call.sequence_tiles import load
from .call.sequences import tiles
from .reference import AttentionBytes, resolve_shapes, wide_dtype
from .scores import sink_gradient

if TYPE_CHECKING:
    from .scores import ScoreHook


def tiled_attention(q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSV: torch.Tensor, *, causal: bool = False,
                    window: int | None = None, scale: float | None = None, dropout_p: float = 0.0,
                    seed: int | None = None, cu_seqlens: torch.Tensor | None = None,
                    cu_seqlens_k: torch.Tensor | None = None, max_seqlen: int | None = None,
                    max_seqlen_k: int | None = None, score: "ScoreHook | None" = None,
                    sinks: torch.Tensor | None = None, return_logsumexp: bool = False, query_tile: int = 128,
                    key_tile: int = 128) -> Any:
    """Compute `reference_attention` in tiles: same arguments, same result, same dropout mask for the same seed.
    Autograd keeps the output and one logsumexp per row; backward computes the weights again.

    - `query_tile`, `key_tile`: sizes of a tile; those of which no pair is seen, by `causal` or `window`, are skipped.

    Raises as the reference does, ValueError for a tile of no positive size, and RuntimeError where its backward would
    be differentiated, under transforms of torch.func, for forward-mode derivatives and for a batch of gradients: use
    the reference for those.
    """
    refuse_transforms("tiled_attention", INSTEAD, (q_BHTD, k_BGSD, v_BGSV, sinks))
    call = resolve(q_BHTD, k_BGSD, v_BGSV, causal=causal, window=window, scale=scale, dropout_p=dropout_p, seed=seed,
                   cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, max_seqlen=max_seqlen, max_seqlen_k=max_seqlen_k,
                   score=score, sinks=sinks)
    check_sizes(query_tile=query_tile, key_tile=key_tile)
    seed = call.seed if isinstance(call.seed, torch.Tensor) else None
    out_BHTV, lse_BHT = Tiled.apply(q_BHTD, k_BGSD, v_BGSV, sinks, seed, call, (query_tile, key_tile))
    return (out_BHTV, lse_BHT) if return_logsumexp else out_BHTV


def check_sizes(**sizes):
    """Raise ValueError for the size of a tile or chunk that is not a positive int."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r}: expected an int of at least 1, such as 128")


class Tiled(torch.autograd.Function):
    """Attention in tiles as one operation: the call's `parts` say which tiles there are."""
    @staticmethod
    def forward(ctx, q_BHTD, k_BGSD, v_BGSV, sinks_H, seed, call, sizes):
        out_BHTV = q_BHTD.new_empty((*q_BHTD.shape[:-1], v_BGSV.shape[-1]))
        lse_BHT = q_BHTD.new_empty(q_BHTD.shape[:-1], dtype=wide_dtype(q_BHTD.dtype))
        with without_autocast(q_BHTD.device):
            _forward(q_BHTD, k_BGSD, v_BGSV, sinks_H, out_BHTV, lse_BHT.unsqueeze(-1), call, sizes)
        ctx.save_for_backward(q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse_BHT, sinks_H, seed)
        # a tensor on ctx would escape saved-tensor hooks
        ctx.call, ctx.sizes = call.with_seed(None if seed is not None else call.seed), sizes
        ctx.set_materialize_grads(False)  # zeros for an unused lse would be a tensor of its own
        return out_BHTV, lse_BHT

    @staticmethod
    def backward(ctx, d_out_BHTV, d_lse_BHT):
        refuse_batched_gradients("tiled_attention", INSTEAD, d_out_BHTV, d_lse_BHT)
        *saved, seed = ctx.saved_tensors
        call = ctx.call if seed is None else ctx.call.with_seed(seed)
        return *_TiledBackward.apply(*saved, d_out_BHTV, d_lse_BHT, call, ctx.sizes), None, None, None


class _TiledBackward(torch.autograd.Function):
    """The backward as an operation of its own: a derivative of it, by dO or by q, k or v, comes here and is refused."""

    @staticmethod
    def forward(ctx, q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse_BHT, sinks_H, d_out_BHTV, d_lse_BHT, call, sizes):
        if d_out_BHTV is None:  # the logsumexp alone was used
            d_out_BHTV = torch.zeros_like(out_BHTV)
        d_lse_BHT1 = None if d_lse_BHT is None else d_lse_BHT.unsqueeze(-1)
        with without_autocast(q_BHTD.device):
            d_sinks_H = None if sinks_H is None else _sinks(out_BHTV, lse_BHT, sinks_H, d_out_BHTV, d_lse_BHT1, sizes)
            return *backward_of(q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse_BHT.unsqueeze(-1), d_out_BHTV, d_lse_BHT1, call,
                                sizes), d_sinks_H

    @staticmethod
    def backward(ctx, *gradients):
        refuse_second_derivative("tiled_attention")


# --- forward ---------------------------------------------------------------------------------------------------------


def _forward(q_BHTD, k_BGSD, v_BGSV, sinks_H, out_BHTV, lse_BHT1, call, sizes):
    tensors = q_BHTD, k_BGSD, v_BGSV, sinks_H, out_BHTV, lse_BHT1
    options = call.dropout_p > 0, call.sequences, call.score, sizes
    in_tiles("forward", [x for x in tensors if x is not None], options,  # but in a dry run, calls it at once
             functools.partial(_forward_tiles, *tensors, call, sizes))


def _forward_tiles(q_BHTD, k_BGSD, v_BGSV, sinks_H, out_BHTV, lse_BHT1, call, sizes, is_new):
    for part in call.parts(q_BHTD, k_BGSD):
        q, out, lse, k, v = part.cut((q_BHTD, out_BHTV, lse_BHT1), (k_BGSD, v_BGSV))
        band = part.sequence.band
        out[:, :, : band.fully_masked].zero_()  # the loop below has no tile for them
        lse[:, :, : band.fully_masked] = -math.inf if sinks_H is None else sinks_H[:, None, None]
        for rows, spans in part.tiles(sizes, is_new):
            _forward_tile(q, k, v, sinks_H, out, lse, part, rows, spans)


def _forward_tile(q_BHTD, k_BGSD, v_BGSV, sinks_H, out_BHTV, lse_BHT1, part, rows, spans):
    """Compute one tile of queries: a loop over the keys that it sees, `spans`. A sink has been seen before the first:
    its weight is 1 at m = sink, and it has no value."""
    q_BGRD = part.load(q_BHTD, rows).mul_(part.call.scale)
    out_BGRV = q_BGRD.new_zeros((*q_BGRD.shape[:-1], v_BGSV.shape[-1]))
    m_BGR1 = q_BGRD.new_full((*q_BGRD.shape[:-1], 1), -math.inf)
    l_BGR1 = torch.zeros_like(m_BGR1)
    if sinks_H is not None:
        m_BGR1.unflatten(2, (-1, rows[1] - rows[0])).copy_(sinks_H.view(part.heads[2], -1, 1, 1))
        l_BGR1.fill_(1)
    for keys in spans:
        m_BGR1 = _online(q_BGRD, k_BGSD, v_BGSV, m_BGR1, l_BGR1, out_BGRV, part, rows, keys)
    if part.call.may_hide:
        l_BGR1.masked_fill_(l_BGR1 == 0, 1)  # a mask has hidden every key: zeros, and ln 1 − ∞
    part.store(out_BHTV, rows, out_BGRV.div_(l_BGR1 * (1 - part.call.dropout_p)))  # once for softmax and dropout
    part.store(lse_BHT1, rows, l_BGR1.log_().add_(m_BGR1))


def _online(q_BGRD, k_BGSD, v_BGSD, m_BGR1, l_BGR1, out_BGRD, part, rows, keys):
    """Add one tile of keys to l and the output, in place; returns the new m."""
    dropped_BGRS = part.dropped(rows, keys)
    s_BGRS = q_BGRD @ part.load(k_BGSD, keys).mT
    if part.call.score is not None:
        s_BGRS = part.by_hook(part.call.score.forward, s_BGRS, rows, keys)
    part.fill_masked(s_BGRS, rows, keys, -math.inf)
    m_new_BGR1 = torch.maximum(m_BGR1, s_BGRS.amax(dim=-1, keepdim=True))
    top_BGR1 = m_new_BGR1.masked_fill(m_new_BGR1 == -math.inf, 0)  # a row with nothing yet: −∞ − (−∞) would be NaN
    p_BGRS = part.exp_(s_BGRS.sub_(top_BGR1))
    shrink_BGR1 = part.exp_(m_BGR1 - top_BGR1)
    l_BGR1.mul_(shrink_BGR1).add_(p_BGRS.sum(dim=-1, keepdim=True))
    if dropped_BGRS is not None:  # l is the sum of all weights: dropout comes after the softmax
        p_BGRS.masked_fill_(dropped_BGRS, 0)
    out_BGRD.mul_(shrink_BGR1).add_(p_BGRS @ part.load(v_BGSD, keys))
    return m_new_BGR1


# --- backward --------------------------------------------------------------------------------------------------------


def backward_of(q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse_BHT1, d_out_BHTV, d_lse_BHT1, call, sizes):
    """Return (dQ, dK, dV). Each tile of queries writes its dQ, and adds in fp32 to dK and dV of the keys it sees."""
    dq_BHTD = torch.empty_like(q_BHTD, memory_format=torch.contiguous_format)
    # in fp32: every tile of queries adds to them
    dk_BGSD, dv_BGSV = (x.new_zeros(x.shape, dtype=lse_BHT1.dtype) for x in (k_BGSD, v_BGSV))
    tensors = q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse_BHT1, d_out_BHTV, d_lse_BHT1, dq_BHTD, dk_BGSD, dv_BGSV
    options = call.dropout_p > 0, call.sequences, call.score, sizes
    in_tiles("backward", [x for x in tensors if x is not None], options,
             functools.partial(_backward_tiles, *tensors, call, sizes))
    return dq_BHTD, dk_BGSD.to(k_BGSD.dtype), dv_BGSV.to(v_BGSV.dtype)


def _backward_tiles(q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse_BHT1, d_out_BHTV, d_lse_BHT1, dq_BHTD, dk_BGSD, dv_BGSV, call,
                    sizes, is_new):
    for part in call.parts(q_BHTD, k_BGSD):
        by_query = (q_BHTD, out_BHTV, lse_BHT1, d_out_BHTV, dq_BHTD, *([] if d_lse_BHT1 is None else [d_lse_BHT1]))
        q, out, lse, d_out, dq, *d_lse, k, v, dk, dv = part.cut(by_query, (k_BGSD, v_BGSV, dk_BGSD, dv_BGSV))
        dq[:, :, : part.sequence.band.fully_masked].zero_()  # the loop below has no tile for them
        for rows, spans in part.tiles(sizes, is_new):
            _backward_tile(q, k, v, out, lse, d_out, d_lse, dq, dk, dv, part, rows, spans)


def _delta(out, d_out, *d_lse):
    """Return Δ = rowsum(dO ∘ O) = rowsum(P ∘ dP), with dropout too; less the logsumexp's own gradient: dL/dS = P."""
    delta = out.mul_(d_out).sum(dim=-1, keepdim=True)
    return delta.sub_(d_lse[0]) if d_lse else delta


def _sinks(out_BHTV, lse_BHT, sinks_H, d_out_BHTV, d_lse_BHT1, sizes):
    """Return the gradient of the sinks, a sum over all rows: also over those that see nothing else."""
    (_, H, T), given, found_H = lse_BHT.shape, [x for x in (out_BHTV, d_out_BHTV, d_lse_BHT1) if x is not None], 0
    for rows in tiles((0, T), sizes[0]):
        delta_BHT = _delta(*(load(x, rows, H) for x in given))[..., 0]  # each head a group of its own
        found_H = found_H + sink_gradient(sinks_H, lse_BHT[:, :, slice(*rows)], delta_BHT)
    return found_H.to(sinks_H.dtype)


def _backward_tile(q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse_BHT1, d_out_BHTV, d_lse, dq_BHTD, dk_BGSD, dv_BGSV, part,
                   rows, spans):
    """Differentiate one tile of queries: a loop over the keys that it sees, `spans`."""
    d_out_BGRV = part.load(d_out_BHTV, rows)
    delta_BGR1 = _delta(part.load(out_BHTV, rows), d_out_BGRV, *(part.load(x, rows) for x in d_lse))
    q_BGRD = part.load(q_BHTD, rows).mul_(part.call.scale)
    lse_BGR1, dq_BGRD = part.load(lse_BHT1, rows), torch.zeros_like(q_BGRD)
    if part.call.may_hide:
        lse_BGR1.clamp_min_(torch.finfo(lse_BGR1.dtype).min)  # of a row whose keys are hidden: −∞ − (−∞) would be NaN
    for keys in spans:
        _gradients(q_BGRD, part.load(k_BGSD, keys), part.load(v_BGSV, keys), lse_BGR1, d_out_BGRV, delta_BGR1, dq_BGRD,
                   dk_BGSD, dv_BGSV, part, rows, keys)
    part.store(dq_BHTD, rows, dq_BGRD.mul_(part.call.scale))


def _gradients(q_BGRD, k_BGSD, v_BGSV, lse_BGR1, d_out_BGRV, delta_BGR1, dq_BGRD, dk_BGSD, dv_BGSV, part, rows, keys):
    """Add to dQ, dK and dV, in place, what one tile of weights contributes."""
    dropout_scale, dropped_BGRS, hook = 1 / (1 - part.call.dropout_p), part.dropped(rows, keys), part.call.score
    p_BGRS, slope_BGRS = q_BGRD @ k_BGSD.mT, 1.0  # computed again: forward has kept no weights
    if hook is not None:
        # before forward: the derivative is at the scores that the hook got
        slope_BGRS = part.by_hook(hook.derivative, p_BGRS, rows, keys)
        p_BGRS = part.by_hook(hook.forward, p_BGRS, rows, keys)
    part.fill_masked(part.exp_(p_BGRS.sub_(lse_BGR1)), rows, keys, 0)
    dp_BGRS = d_out_BGRV @ v_BGSV.mT
    if dropped_BGRS is None:
        part.add(dv_BGSV, keys, p_BGRS.mT @ d_out_BGRV)
    else:  # O = (Z ∘ P) V / (1 − p): dropped weights give nothing, the others are scaled up
        part.add(dv_BGSV, keys, (p_BGRS.masked_fill(dropped_BGRS, 0).mT @ d_out_BGRV).mul_(dropout_scale))
        dp_BGRS.masked_fill_(dropped_BGRS, 0).mul_(dropout_scale)
    ds_BGRS = dp_BGRS.sub_(delta_BGR1).mul_(p_BGRS)
    if hook is not None:
        ds_BGRS.mul_(slope_BGRS)
    part.add(dk_BGSD, keys, ds_BGRS.mT @ q_BGRD)  # over all rows: the heads of a group are summed here
    dq_BGRD += ds_BGRS @ k_BGSD


# --- bytes -----------------------------------------------------------------------------------------------------------


def tiled_attention_bytes(q_shape: Sequence[int], k_shape: Sequence[int], dtype: torch.dtype = torch.float32, *,
                          v_dim: int | None = None, causal: bool = False, window: int | None = None,
                          dropout_p: float = 0.0, query_tile: int = 128, key_tile: int = 128) -> AttentionBytes:
    """Predict the AttentionBytes of `tiled_attention` for shapes (B, H, T, D) and (B, G, S, D), exact. With e bytes an
    element, w a wide one, V the head_dim of v (`v_dim`, by default D), and a tile's sizes n = BH · query_tile and m =
    BG · key_tile:

        kept   e·BHT·V + w·BHT                        the output and its logsumexp
        peak   kept + e·BHT·D + w·BGS·(D + V)         dQ, dK and dV …
               + w·(n·(2D + V) + m·(D + V) + 2n)      tiles of Q, dQ, dO; of K, V; of L, Δ
               + w·(2n·key_tile + max(n·D, m·D, m·V)) P, dP, and the product that is added to dQ, dK or dV

    so the slope in the sequence length is 1. With dropout the last line may be Philox at work, 16 bytes a weight; and
    at the end 16-bit dK and dV are in memory beside the fp32 ones. A drawn seed is 8 bytes more. A hook takes up to
    three tiles n · key_tile more while it runs, whatever the length. Raises as `tiled_attention` does.
    """
    call, (e, w) = resolve_shapes(q_shape, k_shape, dtype, v_dim=v_dim, causal=causal, window=window,
                                  dropout_p=dropout_p)
    check_sizes(query_tile=query_tile, key_tile=key_tile)
    (B, H, T, D), (G, S), band, V = q_shape, k_shape[1:3], call.sequences[0].band, v_dim or q_shape[3]
    kept, keys = e * B * H * T * V + w * B * H * T, B * G * S * (D + V)
    tile_bytes = [e * keys * (e != w)]
    for rows in tiles((band.fully_masked, T), query_tile):
        first, end = band.keys_seen(rows)  # the largest tile is one of the first four: Philox draws four columns
        tile_bytes += [_tile_bytes(B, H, G, D, V, rows, keys, w, dropout_p)
                       for keys in tiles((first, min(end, first + 4 * key_tile)), key_tile)]
    return AttentionBytes(kept, kept + e * B * H * T * D + w * keys + max(tile_bytes))


def _tile_bytes(B, H, G, D, V, rows, keys, w, dropout_p):
    """Return the bytes that backward takes for one tile of weights."""
    n, m, columns = B * H * (rows[1] - rows[0]), B * G * (keys[1] - keys[0]), keys[1] - keys[0]
    held, largest = w * (n * (2 * D + V) + m * (D + V) + 2 * n), w * max(n * D, m * D, m * V)
    if not dropout_p:
        return held + 2 * w * n * columns + largest
    adding = max(2 * w * n * columns + largest, 3 * w * n * columns + w * m * V)  # P, dP; or Z ∘ P too, for dV
    return held + max(dropped_bytes(B, H, rows, keys), 4 * n * runs_of(keys) + adding)
