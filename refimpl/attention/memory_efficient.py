"""Memory-efficient attention: softmax in chunks whose sums are put together at the end; autograd's own backward.

For one chunk of queries, each chunk c of keys is summarised on its own, and the summaries are combined:

    m_c = rowmax(S_c)      l_c = rowsum(e^(S_c − m_c))      O_c = e^(S_c − m_c) V_c
    O = Σ_c e^(m_c − m) O_c  /  Σ_c e^(m_c − m) l_c,        m = max_c m_c

Both the chunk of queries and each summary are checkpointed: autograd keeps their inputs, and backward computes them
again, one chunk of queries at a time, and within it one chunk of keys at a time. At that moment S / key_chunk summaries
and one matrix of key_chunk columns are in memory, which is least for key_chunk near √S: hence O(√S) for a query.
"Self-attention Does Not Need O(n²) Memory" (Rabe & Staats 2021), sections 2 to 4.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

from ..common.derivatives import TRANSFORMS, refuse_transforms
from ..versions import minor_of
from .call.arguments import INSTEAD, resolve, without_autocast
from .call.philox import dropped, dropped_bytes, runs_of
from .call.sequences import tiles
from .reference import AttentionBytes, resolve_shapes, wide_dtype
from .tiled import check_sizes

_checkpoint = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False)  # Philox has no state
KNOWS_TRANSFORMS = minor_of(torch.__version__) >= (2, 13)  # torch's checkpoint: Jvp and Vmap, and computes them right


def memory_efficient_attention(q_BHTD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, *,
                               causal: bool = False, window: int | None = None, scale: float | None = None,
                               dropout_p: float = 0.0, seed: int | None = None, cu_seqlens: torch.Tensor | None = None,
                               cu_seqlens_k: torch.Tensor | None = None, query_chunk: int = 1024,
                               key_chunk: int | None = None) -> torch.Tensor:
    """Compute `reference_attention` in chunks: same arguments, same result, same dropout mask for the same seed.
    Autograd keeps the output alone; backward computes the weights again, and can be differentiated again.

    - `query_chunk`: 1,024 in the paper's code. `key_chunk`: by default ⌈√S⌉. Chunks of keys that no query of a chunk
      sees are skipped.

    Raises as the reference does, ValueError for a chunk of no positive size, and RuntimeError under torch.func's grad,
    vjp, jacrev and hessian, which know no recomputation; before torch 2.13 also under jvp, jacfwd and vmap.
    """
    if KNOWS_TRANSFORMS:
        refuse_transforms("memory_efficient_attention", INSTEAD, refused=["Grad"])
    else:
        refuse_transforms("memory_efficient_attention", INSTEAD, (q_BHTD, k_BGSD, v_BGSD), TRANSFORMS)
    call = resolve(q_BHTD, k_BGSD, v_BGSD, causal=causal, window=window, scale=scale, dropout_p=dropout_p, seed=seed,
                   cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    key_chunk = default_key_chunk(k_BGSD.shape[2]) if key_chunk is None else key_chunk
    check_sizes(query_chunk=query_chunk, key_chunk=key_chunk)
    with without_autocast(q_BHTD.device):
        spans = [(sequence, rows) for sequence in call.sequences for rows in tiles((0, sequence.band.T), query_chunk)]
        # one split: its backward joins all dQ at once, as in _cut
        q_chunks = q_BHTD.split([end - first for _, (first, end) in spans], dim=2)
        return torch.cat([_checkpoint(_query_chunk, q_BHtD, k_BGSD, v_BGSD, call, *span, key_chunk)
                          for q_BHtD, span in zip(q_chunks, spans, strict=True)], dim=2)


def default_key_chunk(S):
    """Return ⌈√S⌉, the paper's choice."""
    return math.isqrt(S - 1) + 1


def _query_chunk(q_BHtD, k_BGSD, v_BGSD, call, sequence, rows, key_chunk):
    """Compute the output of one chunk of queries, in q's dtype."""
    band, G = sequence.band, k_BGSD.shape[1]
    spans = tiles(band.keys_seen(rows), key_chunk)  # chunks that no query here sees are never computed
    if not spans:
        # zeros that autograd can follow back to q
        return (q_BHtD * 0)[..., :1].expand(*q_BHtD.shape[:3], v_BGSD.shape[3])
    q_BGRD = q_BHtD.unflatten(1, (G, -1)).flatten(2, 3)  # the heads of a group become rows of one matrix
    chunks = zip(*(_cut(x, sequence.keys[0], spans) for x in (k_BGSD, v_BGSD)), spans, strict=True)
    summaries = [_checkpoint(_summarise, q_BGRD, k, v, call, sequence, rows, keys, q_BHtD.shape[1])
                 for k, v, keys in chunks]
    seen_R1 = None
    if rows[0] < band.fully_masked:
        seen_R1 = torch.arange(*rows, device=q_BHtD.device).repeat(q_BHtD.shape[1] // G)[:, None] >= band.fully_masked
    out_BGRD = _combine(*zip(*summaries, strict=True), seen_R1)
    out_BGRD = out_BGRD / (1 - call.dropout_p) if call.dropout_p else out_BGRD
    return out_BGRD.to(q_BHtD.dtype).view(*q_BHtD.shape[:3], -1)


def _cut(x_BGSD, start, spans):
    """Cut keys or values into chunks by one split: its backward concatenates all their gradients at once."""
    first, end = start + spans[0][0], start + spans[-1][1]
    sizes = [first, *(end - first for first, end in spans), x_BGSD.shape[2] - end]
    return x_BGSD.split(sizes, dim=2)[1:-1]


def _summarise(q_BGRD, k_BGSD, v_BGSD, call, sequence, rows, keys, H):
    """Summarise a chunk of queries and one of keys: (m, l, O), shapes (B, G, R, 1) twice and (B, G, R, D), in fp32 or
    wider."""
    (B, G), wide = q_BGRD.shape[:2], wide_dtype(q_BGRD.dtype)
    dropped_BGRS = None
    if call.seed is not None:
        at = [[span[0] + x for x in chunk] for span, chunk in zip(sequence[:2], (rows, keys), strict=True)]
        dropped_BHTS = dropped(call.seed, call.dropout_p, B, H, *at, q_BGRD.device)
        dropped_BGRS = dropped_BHTS.unflatten(1, (G, -1)).flatten(2, 3)
    p_BGRS = (q_BGRD.to(wide) * call.scale) @ k_BGSD.to(wide).mT
    mask_TS = sequence.band.mask(rows, keys, q_BGRD.device)
    if mask_TS is not None:
        p_BGRS.masked_fill_(mask_TS.repeat(H // G, 1), -math.inf)
    m_BGR1 = p_BGRS.detach().amax(dim=-1, keepdim=True)  # m cancels out, so it needs no gradient
    p_BGRS = p_BGRS.sub_(m_BGR1.masked_fill(m_BGR1 == -math.inf, 0)).exp_()
    l_BGR1 = p_BGRS.sum(dim=-1, keepdim=True)
    if dropped_BGRS is not None:
        # after l, which is the sum of all weights: dropout follows the softmax
        p_BGRS = p_BGRS.masked_fill(dropped_BGRS, 0)
    return m_BGR1, l_BGR1, p_BGRS @ v_BGSD.to(wide)


def _combine(m_chunks, l_chunks, out_chunks, seen_R1):
    """Return Σ_c e^(m_c − m) O_c / Σ_c e^(m_c − m) l_c; zeros in rows that see nothing."""
    m_BGR1 = functools.reduce(torch.maximum, m_chunks)
    m_BGR1 = m_BGR1.masked_fill(m_BGR1 == -math.inf, 0)  # a row that sees nothing: −∞ − (−∞) would be NaN
    shrinks = [(m - m_BGR1).exp() for m in m_chunks]
    l_BGR1, out_BGRD = shrinks[0] * l_chunks[0], shrinks[0] * out_chunks[0]
    for shrink, l_chunk, out_chunk in zip(shrinks[1:], l_chunks[1:], out_chunks[1:], strict=True):
        l_BGR1, out_BGRD = l_BGR1.addcmul(shrink, l_chunk), out_BGRD.addcmul(shrink, out_chunk)
    if seen_R1 is not None:
        l_BGR1, out_BGRD = l_BGR1.where(seen_R1, 1), out_BGRD.where(seen_R1, 0)  # else 0/0
    return out_BGRD / l_BGR1


# --- bytes -----------------------------------------------------------------------------------------------------------


def memory_efficient_attention_bytes(q_shape: Sequence[int], k_shape: Sequence[int], dtype: torch.dtype = torch.float32,
                                     *, causal: bool = False, window: int | None = None, dropout_p: float = 0.0,
                                     query_chunk: int = 1024, key_chunk: int | None = None) -> AttentionBytes:
    """Predict the AttentionBytes of `memory_efficient_attention` for shapes (B, H, T, D) and (B, G, S, D). With Q =
    BHTD and K = BGSD elements, e bytes an element, w a wide one, n = BH · query_chunk rows and c = S / key_chunk
    summaries:

        kept   e·Q                                             the output
        peak   the largest, over the chunks of queries, of these three above 2e·Q + 2e·K (output, dQ, dK and dV):
               w·n·(c·(D + 3) + 2D + …)                        all summaries, while they are combined again
               w·n·(c·(D + 1) + 3·key_chunk + …)               their gradients, and P, dP, dS of one chunk of keys
               3e·K                                            dK and dV of one chunk of queries, concatenated

    The first falls and the second grows with key_chunk: c = S / key_chunk is √S at key_chunk = √S, so that the
    summaries of a query take O(√S · D). Rabe & Staats 2021, section 3 (they give the order; the constants are those of
    the code above). Within 2 % of the tracker, and exact in most fp32 shapes; with dropout within 6 %. Raises as
    `memory_efficient_attention` does.
    """
    call, (e, w) = resolve_shapes(q_shape, k_shape, dtype, causal=causal, window=window, dropout_p=dropout_p)
    key_chunk = default_key_chunk(k_shape[2]) if key_chunk is None else key_chunk
    check_sizes(query_chunk=query_chunk, key_chunk=key_chunk)
    (B, H, T, D), (G, S), band = q_shape, k_shape[1:3], call.sequences[0].band
    Q, K, peak = e * B * H * T * D, e * B * G * S * D, 0
    for rows in tiles((0, T), query_chunk):
        parts = Q - e * B * H * rows[1] * D  # dQ of the chunks after this one, which backward has done
        added = 2 * K * (rows[1] < T)  # and their dK and dV
        n, (first, end) = B * H * (rows[1] - rows[0]), band.keys_seen(rows)
        spans = tiles((first, end), key_chunk)
        if spans:
            # A chunk of queries is a strided view: to make its groups' heads one matrix copies it, and its gradient.
            copied = e * n * D * (rows[1] - rows[0] < T) * (H > G)
            q, d_out = copied, w * n * D if w != e else copied
            summaries = w * n * (len(spans) * (D + 3) + 2 * D + 3)
            tile = _tile_bytes(B, H, G, rows, spans[0], w, dropout_p, band.pairs() < T * S) + w * n * (w != e)
            seen = e * B * G * D * (end - first)
            beside = e * n * D + 2 * seen + (K - seen) + K  # keys that are not seen get a gradient of zeros
            waiting = _waiting_bytes(n, [e * B * G * D * (last - first) for first, last in spans], D, w)
            peak = max(peak, parts + added + max(q + d_out + summaries, q + waiting + tile, beside))
    return AttentionBytes(Q, Q + peak)


def _waiting_bytes(n, chunks, D, w):
    """Return the bytes in memory beside the chunk of keys that is differentiated, at their maximum.

    Backward goes from the last chunk to the first. With each chunk, fewer gradients of O_c and l_c are left, and more
    gradients of k and v exist. `chunks`: bytes of the keys of each chunk.
    """
    count = len(chunks)
    return max(w * n * ((count - j + 1) * D + count - j) + chunks[0] + 2 * sum(chunks[count - j:])
               for j in (min(1, count - 1), count - 1))


def _tile_bytes(B, H, G, rows, keys, w, dropout_p, masked):
    """Return the bytes of P, dP, dS and the masks of one chunk of keys; with dropout also Z ∘ P and Z, or Philox's."""
    count, columns = rows[1] - rows[0], keys[1] - keys[0]
    weights = B * H * count * columns
    masks = H // G * count * columns * masked
    if not dropout_p:
        return 3 * w * weights + masks
    return max(dropped_bytes(B, H, rows, keys), 3 * w * weights + masks + 4 * B * H * count * runs_of(keys))
