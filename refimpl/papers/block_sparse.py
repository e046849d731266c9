"""Sparse attention in one screen: FlashAttention's tiles, for those blocks alone of which a query sees a key.

A mask says which key j a query i sees: `sees(i, j)`. Cut T × T pairs into blocks of N × N, R of queries and C of keys.
Of most blocks of a window no pair is seen. Those are on no list, so nobody computes them:

    lists[R] = [(C, seen), …]    C: a block of which some pair is seen; seen: its booleans, None where all are

Attention passes the lists, with FlashAttention's running values m, l and O of each row (flash_attention.py has them),
and the score of a pair that is not seen is −∞:

    S = Q Kᵀ / √D        P = e^(S − L)        dS = P ∘ (dO Vᵀ − Δ)

FLOPs are those of the listed blocks: of a window w about T · (w + N) pairs in place of T². A mask that is applied to
all scores computes T² of them, and throws most away.

Longformer (Beltagy et al. 2020), section 3.1: a window and global tokens. BigBird (Zaheer et al. 2020), section 2:
random blocks beside them. "Flex Attention" (Dong et al. 2024), section 3: lists of blocks, full and partial.
"""

import math

import torch

N = 64  # rows and columns of a block


def longformer(window, tokens):
    """Return the mask of a causal window behind each query, and of global tokens, the first ones."""
    return lambda i, j: (j <= i) & ((i - j <= window) | (j < tokens) | (i < tokens))


def lists(sees, T):
    """Return {R: [(C, None or its booleans), …]}: the blocks of keys that the queries of block R see."""
    found = {}
    for row in range(0, T, N):
        i = torch.arange(row, min(row + N, T))[:, None]
        for key in range(0, T, N):
            seen = sees(i, torch.arange(key, min(key + N, T)))
            if seen.any():
                found.setdefault(row // N, []).append((key // N, None if seen.all() else seen))
    return found


def rows(R):
    """Return the rows of block R."""
    return slice(R * N, R * N + N)


def scores(q_RD, k, C, seen):
    """Return a block of S, with −∞ where a pair is not seen."""
    s_RC = q_RD @ k[:, :, rows(C)].mT * k.shape[-1] ** -0.5
    return s_RC if seen is None else s_RC.masked_fill_(~seen, -math.inf)


class BlockSparse(torch.autograd.Function):
    """Attention of q, k and v, (B, H, T, D) each, over lists of blocks: `.apply`. Each query is to see some key."""

    @staticmethod
    def forward(ctx, q, k, v, blocks):
        """Pass the listed blocks of keys by one block of queries after the other."""
        out, lse = torch.zeros_like(q), q.new_full((*q.shape[:3], 1), -math.inf)
        for R, listed in blocks.items():
            m_R1, l_R1, o_RD = -math.inf, 0.0, 0.0
            for C, seen in listed:
                s_RC = scores(q[:, :, rows(R)], k, C, seen)
                new_m_R1 = s_RC.amax(-1, keepdim=True).clamp_min(m_R1).clamp_min(torch.finfo(q.dtype).min)  # not −∞
                p_RC, shrink_R1 = (s_RC - new_m_R1).exp(), (m_R1 - new_m_R1).exp()
                l_R1, o_RD = shrink_R1 * l_R1 + p_RC.sum(-1, keepdim=True), shrink_R1 * o_RD + p_RC @ v[:, :, rows(C)]
                m_R1 = new_m_R1
            out[:, :, rows(R)], lse[:, :, rows(R)] = o_RD / l_R1, m_R1 + l_R1.log()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx, d_out):
        """Pass the same lists."""
        (q, k, v, out, lse), scale = ctx.saved_tensors, ctx.saved_tensors[0].shape[-1] ** -0.5
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        delta = (d_out * out).sum(-1, keepdim=True)
        for R, listed in ctx.blocks.items():
            q_RD, d_out_RD = q[:, :, rows(R)], d_out[:, :, rows(R)]
            for C, seen in listed:
                p_RC = (scores(q_RD, k, C, seen) - lse[:, :, rows(R)]).exp()
                ds_RC = p_RC * (d_out_RD @ v[:, :, rows(C)].mT - delta[:, :, rows(R)])
                dv[:, :, rows(C)] += p_RC.mT @ d_out_RD
                dq[:, :, rows(R)] += ds_RC @ k[:, :, rows(C)] * scale
                dk[:, :, rows(C)] += ds_RC.mT @ q_RD * scale
        return dq, dk, dv, None
