"""Native sparse attention in one screen: a summary of every block, a few blocks token by token, and a window.

Cut the keys into blocks of N tokens. A query of block R attends three times, and gates weigh the results:

    compressed   k̃_C = φ(keys of block C), of the blocks C < R that ended       p = softmax(q k̃ᵀ / √D)
    selected     the K blocks of the largest Σ p over the heads of a group; the first, the own and the one before always
    sliding      the last W tokens before the query, and itself

    out = Σ σ(g_c(q)) · out_c                                                    c: one of the three

Each query selects for itself, from what has ended before it: a choice that a block shared would know later queries. The
heads of a group share keys, and so one choice. The choice has no gradient. What it is made from has one: p weighs the
compressed values, so that φ and q learn which blocks are worth reading.

A query computes T/N + K·N + W scores in place of T, and nothing keeps them: each block of queries is computed again in
backward. "Native Sparse Attention" (Yuan et al. 2025), section 3. There φ is an MLP with an embedding of places, here a
linear map of all N·D numbers of a block, which has weights for each place; blocks do not overlap, and the branches
share their keys and values.
"""

import math

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

N, K, W = 32, 8, 128  # tokens of a block, blocks that a query selects, tokens of the window


def attend(q_RD, k_SD, v_SD, seen_RS):
    """Return softmax(q kᵀ / √D) v over the pairs that are seen, and the weights."""
    s_RS = (q_RD @ k_SD.mT * q_RD.shape[-1] ** -0.5).masked_fill(~seen_RS, -math.inf)
    p_RS = s_RS.softmax(-1)
    return p_RS @ v_SD, p_RS


class NativeSparse(nn.Module):
    """Causal attention of q (B, G, M, T, D), M query heads to each of G groups, and k, v (B, G, T, D). N divides T."""

    def __init__(self, D):
        super().__init__()
        self.phi_k, self.phi_v = nn.Linear(N * D, D), nn.Linear(N * D, D)
        self.gates = nn.Linear(D, 3)

    def forward(self, q, k, v):
        """Compute one block of queries after the other: (B, G, M, T, D)."""
        k_BGCND, v_BGCND = (x.unflatten(2, (-1, N)) for x in (k, v))
        short = self.phi_k(k_BGCND.flatten(3)), self.phi_v(v_BGCND.flatten(3))  # (B, G, T/N, D) each
        return torch.cat([checkpoint(self.block, R, q_R, k_BGCND, v_BGCND, *short, use_reentrant=False)
                          for R, q_R in enumerate(q.split(N, dim=3))], dim=3)

    def block(self, R, q, k, v, short_k, short_v):
        """Return the output of block R of queries, (B, G, M, N, D)."""
        every = torch.ones(N, R, dtype=torch.bool)
        compressed, p = attend(q, short_k[:, :, None, :R], short_v[:, :, None, :R], every)
        i = torch.arange(R * N, R * N + N)
        first = max(0, R - -(-W // N))
        j = torch.arange(first * N, R * N + N)
        near_k, near_v = (x[:, :, None, first : R + 1].flatten(3, 4) for x in (k, v))
        sliding, _ = attend(q, near_k, near_v, (j <= i[:, None]) & (i[:, None] - j <= W))
        gates = self.gates(q).sigmoid().unsqueeze(-2).unbind(-1)
        outs = compressed, selected(q, k, v, chosen(p, R), i), sliding
        return sum(gate * out for gate, out in zip(gates, outs, strict=True))


def chosen(p, R):
    """Return the blocks that each query of block R selects, (B, G, N, K or fewer), by its weights (B, G, M, N, R)."""
    worth = torch.cat([p.detach().sum(2), p.new_zeros(*p.shape[:2], N, 1)], dim=-1)
    worth[..., [0, max(R - 1, 0), R]] = math.inf
    return worth.topk(min(K, R + 1)).indices


def selected(q, k, v, blocks, i):
    """Return the attention of each query to the tokens of its own blocks."""
    b, g = torch.arange(len(k))[:, None, None, None], torch.arange(k.shape[1])[:, None, None]
    its_k, its_v = (x[b, g, blocks].flatten(3, 4) for x in (k, v))  # (B, G, N, K·N, D): of each query by itself
    places = (blocks[..., None] * N + torch.arange(N)).flatten(3)
    seen = places <= i[:, None]
    return attend(q.transpose(2, 3), its_k, its_v, seen[..., None, :])[0].transpose(2, 3)
