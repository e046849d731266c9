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
from typing import NamedTuple

import torch

from .call.arguments import refuse_second_derivative, resolve, without_autocast
from .call.band import tiles
from .call.dry import in_tiles
from .call.philox import dropped, dropped_bytes, runs_of
from .reference import AttentionBytes, resolve_shapes, wide_dtype


def tiled_attention(q_BHTD, k_BGSD, v_BGSD, *, causal=False, window=None, scale=None, dropout_p=0.0, seed=None,
                    cu_seqlens=None, cu_seqlens_k=None, return_logsumexp=False, query_tile=128, key_tile=128):
    """Compute `reference_attention` in tiles: same arguments, same result, same dropout mask for the same seed.
    Autograd keeps the output and one logsumexp per row; backward computes the weights again.

    - `query_tile`, `key_tile`: sizes of a tile; tiles that are masked altogether (above the diagonal, outside the
      window) are skipped.

    Raises as the reference does, ValueError for a tile of no positive size, and RuntimeError where its backward would
    be differentiated: use the reference for that.
    """
    call = resolve(q_BHTD, k_BGSD, v_BGSD, causal=causal, window=window, scale=scale, dropout_p=dropout_p, seed=seed,
                   cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    check_sizes(query_tile=query_tile, key_tile=key_tile)
    seed = call.seed if isinstance(call.seed, torch.Tensor) else None
    out_BHTD, lse_BHT = _Tiled.apply(q_BHTD, k_BGSD, v_BGSD, seed, call, (query_tile, key_tile))
    return (out_BHTD, lse_BHT) if return_logsumexp else out_BHTD


def check_sizes(**sizes):
    """Raise ValueError for the size of a tile or chunk that is not a positive int."""
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"{name}={size!r}: expected an int of at least 1, such as 128")


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BHTD, k_BGSD, v_BGSD, seed, call, sizes):
        out_BHTD = q_BHTD.new_empty(q_BHTD.shape)
        lse_BHT = q_BHTD.new_empty(q_BHTD.shape[:-1], dtype=wide_dtype(q_BHTD.dtype))
        with without_autocast(q_BHTD.device):
            _forward(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT.unsqueeze(-1), call, sizes)
        ctx.save_for_backward(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT, seed)
        ctx.call, ctx.sizes = call._replace(seed=None if seed is not None else call.seed), sizes
        ctx.set_materialize_grads(False)
        return out_BHTD, lse_BHT

    @staticmethod
    def backward(ctx, d_out_BHTD, d_lse_BHT):
        *saved, seed = ctx.saved_tensors
        call = ctx.call if seed is None else ctx.call._replace(seed=seed)
        return *_Gradients.apply(*saved, d_out_BHTD, d_lse_BHT, call, ctx.sizes), None, None, None


class _Gradients(torch.autograd.Function):
    """The backward as an operation of its own: a derivative of it, by dO or by q, k or v, comes here and is refused."""

    @staticmethod
    def forward(ctx, q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT, d_out_BHTD, d_lse_BHT, call, sizes):
        if d_out_BHTD is None:  # the logsumexp alone was used
            d_out_BHTD = torch.zeros_like(out_BHTD)
        d_lse_BHT1 = None if d_lse_BHT is None else d_lse_BHT.unsqueeze(-1)
        with without_autocast(q_BHTD.device):
            return backward_of(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT.unsqueeze(-1), d_out_BHTD, d_lse_BHT1, call,
                             sizes)

    @staticmethod
    def backward(ctx, *gradients):
        refuse_second_derivative("tiled_attention")


# --- tiles -----------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """Describes one sequence of a call: its heads, and which weights of a tile are masked or dropped."""

    call: object
    sequence: object
    heads: tuple  # (B, H, G)
    device: torch.device

    @classmethod
    def of(cls, call, q_BHTD, k_BGSD):
        heads = (*q_BHTD.shape[:2], k_BGSD.shape[1])
        return [cls(call, sequence, heads, q_BHTD.device) for sequence in call.sequences]

    def tiles(self, sizes, is_new):
        """Yield (rows, [keys, …]) of the tiles that are to be computed: those of which `is_new(shape)` is True."""
        band = self.sequence.band
        for rows in tiles((band.fully_masked, band.T), sizes[0]):
            spans = [keys for keys in tiles(band.keys_seen(rows), sizes[1]) if is_new((
                rows[1] - rows[0], keys[1] - keys[0], band.all_seen(rows, keys), runs_of(keys), band.left, band.right))]
            if spans:
                yield rows, spans

    def cut(self, by_query, by_key):
        """Return views of the sequence's own rows of tensors (B, H, T, …) and (B, G, S, …)."""
        _, (queries, keys, _), _, _ = self
        return [x[:, :, slice(*queries)] for x in by_query] + [x[:, :, slice(*keys)] for x in by_key]

    def fill_masked(self, tile_BGRS, rows, keys, value):
        """Write `value` where a row does not see a key. Returns the tile, (B, G, H/G · rows, keys)."""
        mask_TS = self.sequence.band.mask(rows, keys, self.device)
        if mask_TS is not None:
            tile_BGRS.unflatten(2, (-1, len(mask_TS))).masked_fill_(mask_TS, value)
        return tile_BGRS

    def dropped(self, rows, keys):
        """Return the tile of the dropout mask, (B, G, H/G · rows, keys); None without dropout."""
        (B, H, G), call = self.heads, self.call
        if call.seed is None:
            return None
        rows, keys = ([self.sequence[i][0] + x for x in span] for i, span in enumerate((rows, keys)))
        dropped_BHTS = dropped(call.seed, call.dropout_p, B, H, rows, keys, self.device)
        return dropped_BHTS.unflatten(1, (G, -1)).flatten(2, 3)


def _load(x_BHTD, span, groups):
    """Copy the rows `span` = (first, end) into a contiguous tile of wide dtype, (B, G, H/G · rows, D).

    The heads of a group become rows of one matrix. A kernel would load such a tile into on-chip memory.
    """
    tile = x_BHTD[:, :, slice(*span)].unflatten(1, (groups, -1))
    return tile.to(wide_dtype(x_BHTD.dtype), memory_format=torch.contiguous_format, copy=True).flatten(2, 3)


def _store(x_BHTD, span, tile_BGRD, groups):
    """Copy a tile back, rounded to x's dtype."""
    place = x_BHTD[:, :, slice(*span)].unflatten(1, (groups, -1))
    place.copy_(tile_BGRD.view(place.shape))


# --- forward ---------------------------------------------------------------------------------------------------------


def _forward(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT1, call, sizes):
    tensors = q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT1
    options = call.dropout_p > 0, call.sequences, sizes
    in_tiles("forward", tensors, options, functools.partial(_forward_tiles, *tensors, call, sizes))


def _forward_tiles(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT1, call, sizes, is_new):
    for part in _Part.of(call, q_BHTD, k_BGSD):
        q, out, lse, k, v = part.cut((q_BHTD, out_BHTD, lse_BHT1), (k_BGSD, v_BGSD))
        band = part.sequence.band
        out[:, :, : band.fully_masked].zero_()
        lse[:, :, : band.fully_masked].fill_(-math.inf)
        for rows, spans in part.tiles(sizes, is_new):
            _forward_tile(q, k, v, out, lse, part, rows, spans)


def _forward_tile(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT1, part, rows, spans):
    """Compute one tile of queries: a loop over the keys that it sees, `spans`."""
    G = part.heads[2]
    q_BGRD = _load(q_BHTD, rows, G).mul_(part.call.scale)
    m_BGR1 = q_BGRD.new_full((*q_BGRD.shape[:-1], 1), -math.inf)
    l_BGR1, out_BGRD = torch.zeros_like(m_BGR1), torch.zeros_like(q_BGRD)
    for keys in spans:
        m_BGR1 = _online(q_BGRD, k_BGSD, v_BGSD, m_BGR1, l_BGR1, out_BGRD, part, rows, keys)
    _store(out_BHTD, rows, out_BGRD.div_(l_BGR1 * (1 - part.call.dropout_p)), G)
    _store(lse_BHT1, rows, l_BGR1.log_().add_(m_BGR1), G)


def _online(q_BGRD, k_BGSD, v_BGSD, m_BGR1, l_BGR1, out_BGRD, part, rows, keys):
    """Add one tile of keys to l and the output, in place; returns the new m."""
    G, dropped_BGRS = part.heads[2], part.dropped(rows, keys)
    s_BGRS = q_BGRD @ _load(k_BGSD, keys, G).mT
    part.fill_masked(s_BGRS, rows, keys, -math.inf)
    m_new_BGR1 = torch.maximum(m_BGR1, s_BGRS.amax(dim=-1, keepdim=True))
    top_BGR1 = m_new_BGR1.masked_fill(m_new_BGR1 == -math.inf, 0)  # a row with nothing yet: −∞ − (−∞) would be NaN
    p_BGRS = s_BGRS.sub_(top_BGR1).exp_()
    shrink_BGR1 = (m_BGR1 - top_BGR1).exp_()
    l_BGR1.mul_(shrink_BGR1).add_(p_BGRS.sum(dim=-1, keepdim=True))
    if dropped_BGRS is not None:  # l is the sum of all weights: dropout comes after the softmax
        p_BGRS.masked_fill_(dropped_BGRS, 0)
    out_BGRD.mul_(shrink_BGR1).add_(p_BGRS @ _load(v_BGSD, keys, G))
    return m_new_BGR1


# --- backward --------------------------------------------------------------------------------------------------------


def backward_of(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT1, d_out_BHTD, d_lse_BHT1, call, sizes):
    """Return (dQ, dK, dV). Each tile of queries writes its dQ, and adds in fp32 to dK and dV of the keys it sees."""
    dq_BHTD = torch.zeros_like(q_BHTD, memory_format=torch.contiguous_format)
    dk_BGSD, dv_BGSD = (k_BGSD.new_zeros(k_BGSD.shape, dtype=lse_BHT1.dtype) for _ in range(2))
    tensors = q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT1, d_out_BHTD, d_lse_BHT1, dq_BHTD, dk_BGSD, dv_BGSD
    options = call.dropout_p > 0, call.sequences, sizes
    in_tiles("backward", [x for x in tensors if x is not None], options,
             functools.partial(_backward_tiles, *tensors, call, sizes))
    return dq_BHTD, dk_BGSD.to(k_BGSD.dtype), dv_BGSD.to(v_BGSD.dtype)


def _backward_tiles(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse_BHT1, d_out_BHTD, d_lse_BHT1, dq_BHTD, dk_BGSD, dv_BGSD, call,
                    sizes, is_new):
    for part in _Part.of(call, q_BHTD, k_BGSD):
        by_query = (q_BHTD, out_BHTD, lse_BHT1, d_out_BHTD, dq_BHTD, *([] if d_lse_BHT1 is None else [d_lse_BHT1]))
        q, out, lse, d_out, dq, *d_lse, k, v, dk, dv = part.cut(by_query, (k_BGSD, v_BGSD, dk_BGSD, dv_BGSD))
        for rows, spans in part.tiles(sizes, is_new):
            _backward_tile(q, k, v, lse, d_out, _delta(out, d_out, d_lse, rows, part.heads[2]), dq, dk, dv, part, rows,
                           spans)


def _delta(out_BHTD, d_out_BHTD, d_lse, rows, G):
    """Return Δ = rowsum(dO ∘ O) = rowsum(P ∘ dP), with dropout too; less the logsumexp's own gradient: dL/dS = P."""
    delta_BGR1 = _load(out_BHTD, rows, G).mul_(_load(d_out_BHTD, rows, G)).sum(dim=-1, keepdim=True)
    return delta_BGR1.sub_(_load(d_lse[0], rows, G)) if d_lse else delta_BGR1


def _backward_tile(q_BHTD, k_BGSD, v_BGSD, lse_BHT1, d_out_BHTD, delta_BGR1, dq_BHTD, dk_BGSD, dv_BGSD, part, rows,
                   spans):
    """Differentiate one tile of queries: a loop over the keys that it sees, `spans`."""
    G = part.heads[2]
    q_BGRD, d_out_BGRD = _load(q_BHTD, rows, G).mul_(part.call.scale), _load(d_out_BHTD, rows, G)
    lse_BGR1, dq_BGRD = _load(lse_BHT1, rows, G), torch.zeros_like(q_BGRD)
    for keys in spans:
        own_dk, own_dv = (x[:, :, slice(*keys)] for x in (dk_BGSD, dv_BGSD))
        _gradients(q_BGRD, _load(k_BGSD, keys, G), _load(v_BGSD, keys, G), lse_BGR1, d_out_BGRD, delta_BGR1, dq_BGRD,
                   own_dk, own_dv, part, rows, keys)
    _store(dq_BHTD, rows, dq_BGRD.mul_(part.call.scale), G)


def _gradients(q_BGRD, k_BGSD, v_BGSD, lse_BGR1, d_out_BGRD, delta_BGR1, dq_BGRD, dk_BGSD, dv_BGSD, part, rows, keys):
    """Add to dQ, dK and dV, in place, what one tile of weights contributes."""
    dropout_scale, dropped_BGRS = 1 / (1 - part.call.dropout_p), part.dropped(rows, keys)
    p_BGRS = part.fill_masked((q_BGRD @ k_BGSD.mT).sub_(lse_BGR1).exp_(), rows, keys, 0)
    dp_BGRS = d_out_BGRD @ v_BGSD.mT
    if dropped_BGRS is None:
        dv_BGSD += p_BGRS.mT @ d_out_BGRD
    else:  # O = (Z ∘ P) V / (1 − p): dropped weights give nothing, the others are scaled up
        dv_BGSD += (p_BGRS.masked_fill(dropped_BGRS, 0).mT @ d_out_BGRD).mul_(dropout_scale)
        dp_BGRS.masked_fill_(dropped_BGRS, 0).mul_(dropout_scale)
    ds_BGRS = dp_BGRS.sub_(delta_BGR1).mul_(p_BGRS)
    dk_BGSD += ds_BGRS.mT @ q_BGRD  # over all rows: the heads of a group are summed here
    dq_BGRD += ds_BGRS @ k_BGSD


# --- bytes -----------------------------------------------------------------------------------------------------------


def tiled_attention_bytes(q_shape, k_shape, dtype=torch.float32, *, causal=False, window=None, dropout_p=0.0,
                          query_tile=128, key_tile=128):
    """Predict the AttentionBytes of `tiled_attention` for shapes (B, H, T, D) and (B, G, S, D), exact. With Q = BHTD
    and K = BGSD elements, e bytes an element, w a wide one, and a tile's sizes n = BH · query_tile and m = BG ·
    key_tile:

        kept   e·Q + w·BHT                            the output and its logsumexp
        peak   kept + e·Q + 2w·K                      dQ, dK and dV …
               + w·(3n·D + 2m·D + 2n)                 tiles of Q, dO, dQ; of K, V; of L, Δ
               + w·(2n·key_tile + max(n, m)·D)        P, dP, and the product that is added to dQ or dK

    so the slope in the sequence length is 1. With dropout the last line may be Philox at work, 16 bytes a weight; and
    at the end 16-bit dK and dV are in memory beside the fp32 ones. A drawn seed is 8 bytes more. Raises as
    `tiled_attention` does.
    """
    call, (e, w) = resolve_shapes(q_shape, k_shape, dtype, causal=causal, window=window, dropout_p=dropout_p)
    check_sizes(query_tile=query_tile, key_tile=key_tile)
    (B, H, T, D), (G, S), band = q_shape, k_shape[1:3], call.sequences[0].band
    Q, K = B * H * T * D, B * G * S * D
    kept = e * Q + w * B * H * T
    tile_bytes = [2 * e * K * (e != w)]
    for rows in tiles((band.fully_masked, T), query_tile):
        first, end = band.keys_seen(rows)  # the largest tile is one of the first four: Philox draws four columns
        tile_bytes += [_tile_bytes(B, H, G, D, rows, keys, w, dropout_p)
                       for keys in tiles((first, min(end, first + 4 * key_tile)), key_tile)]
    return AttentionBytes(kept, kept + e * Q + 2 * w * K + max(tile_bytes))


def _tile_bytes(B, H, G, D, rows, keys, w, dropout_p):
    """Return the bytes that backward takes for one tile of weights."""
    n, m, columns = B * H * (rows[1] - rows[0]), B * G * (keys[1] - keys[0]), keys[1] - keys[0]
    held, largest = w * (3 * n * D + 2 * m * D + 2 * n), w * max(n, m) * D
    if not dropout_p:
        return held + 2 * w * n * columns + largest
    adding = max(2 * w * n * columns + largest, 3 * w * n * columns + w * m * D)  # P, dP; or Z ∘ P too, for dV
    return held + max(dropped_bytes(B, H, rows, keys), 4 * n * runs_of(keys) + adding)
