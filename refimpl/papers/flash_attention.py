"""FlashAttention in one screen: attention in tiles, forward and backward, so that no T × T matrix ever exists.

Attention is O = softmax(S) V with the scores S = Q Kᵀ / √D, one row for each query; causal: query i sees keys 0 … i.
While tiles of keys pass a tile of queries, three running values of each row give the softmax of all keys seen so far:

    m' = max(m, rowmax(S))                    the largest score
    l' = e^(m − m') l + rowsum(e^(S − m'))    the sum of the exponentials, all relative to the largest score
    O' = e^(m − m') O + e^(S − m') V          the output, not yet divided by l

At the end O / l is the output, and L = m + ln l the logsumexp. Forward keeps O and L alone, which grow with T and not
with T². With L, backward computes a tile of the weights again, P = e^(S − L), and with Δ = rowsum(dO ∘ O):

    dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP − Δ)      dQ = dS K / √D      dK = dSᵀ Q / √D

"FlashAttention" (Dao et al. 2022), section 3.1, algorithms 1 and 4; "FlashAttention-2" (Dao 2023), section 3.1,
algorithms 1 and 2, has this order of loops, and L in place of m and l. In a kernel a tile is in memory on the chip.
"""

import math

import torch

TILE = 128  # rows of a tile


def attention(q, k, v):
    """Return causal attention of q, k and v, (B, H, T, D) each."""
    return FlashAttention.apply(q, k, v)


def tiles(first, end):
    """Return the rows first … end − 1 as slices of at most TILE rows."""
    return [slice(row, min(row + TILE, end)) for row in range(first, end, TILE)]


def scores(q, k, rows, keys):
    """Return a tile of S, with −∞ where a query does not see a key."""
    s = (q[:, :, rows] * q.shape[-1] ** -0.5) @ k[:, :, keys].mT  # (B, H, rows, keys)
    query, key = torch.arange(rows.start, rows.stop), torch.arange(keys.start, keys.stop)
    return s.masked_fill_(key > query[:, None], -math.inf)


class FlashAttention(torch.autograd.Function):
    """Compute attention; backward computes the weights again."""

    @staticmethod
    def forward(ctx, q, k, v):
        """Pass all keys by one tile of queries after the other."""
        T = q.shape[2]
        out, lse = torch.empty_like(q), q.new_empty(*q.shape[:3], 1)
        for rows in tiles(0, T):
            m_R1, l_R1, o_RD = -math.inf, 0.0, 0.0  # of R queries; K keys pass at a time; D: head_dim
            for keys in tiles(0, rows.stop):  # no query of this tile sees a later one
                s_RK = scores(q, k, rows, keys)
                new_m_R1 = s_RK.amax(-1, keepdim=True).clamp_min(m_R1)  # m′; first, m = −∞ and shrink = 0
                p_RK, shrink_R1 = (s_RK - new_m_R1).exp(), (m_R1 - new_m_R1).exp()  # p is not divided by l yet
                l_R1 = shrink_R1 * l_R1 + p_RK.sum(-1, keepdim=True)
                o_RD = shrink_R1 * o_RD + p_RK @ v[:, :, keys]
                m_R1 = new_m_R1
            out[:, :, rows], lse[:, :, rows] = o_RD / l_R1, m_R1 + l_R1.log()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        """Pass all queries by one tile of keys after the other."""
        q, k, v, out, lse = ctx.saved_tensors
        T, scale = q.shape[2], q.shape[-1] ** -0.5
        delta = (d_out * out).sum(-1, keepdim=True)  # (B, H, T, 1)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for keys in tiles(0, T):
            for rows in tiles(keys.start, T):  # no query before these keys sees them
                p_RK = (scores(q, k, rows, keys) - lse[:, :, rows]).exp()
                dv[:, :, keys] += p_RK.mT @ d_out[:, :, rows]
                ds_RK = p_RK * (d_out[:, :, rows] @ v[:, :, keys].mT - delta[:, :, rows])
                dq[:, :, rows] += ds_RK @ k[:, :, keys]
                dk[:, :, keys] += ds_RK.mT @ (q[:, :, rows] * scale)
        return dq.mul_(scale), dk, dv
