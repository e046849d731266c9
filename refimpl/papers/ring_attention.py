"""Ring attention in one screen: each of N ranks has 1/N of the tokens, and no rank has all keys at once.

Rank r keeps its queries; keys and values go around. In each of N steps a rank computes attention over the block that
is here, while it is on its way to the next rank. A block gives an output and a logsumexp L of each row; two are merged:

    L = ln(e^L_a + e^L_b)        O = e^(L_a − L) O_a + e^(L_b − L) O_b

Backward needs the L of the whole sequence alone: P = e^(S − L) are the final weights of any block. With
Δ = rowsum(dO ∘ O), each block adds to dQ, which stays, and to the dK and dV of its keys, which go around with them:

    dV = Pᵀ dO      dP = dO Vᵀ      dS = P ∘ (dP − Δ)      dQ = dS K / √D      dK = dSᵀ Q / √D

Causal, in plain order, rank 0's queries see one block and those of rank N−1 see N: all wait for the last rank. In
zig-zag order rank r has chunks r and 2N−1−r of 2N, one early and one late: all ranks compute as much in each step.

    kept for backward     q, k, v, O and L of a rank's tokens: 1/N of attention on one device
    a rank sends          (N−1) times k and v in forward; in backward as much, and N times dK and dV

"Ring Attention with Blockwise Transformers" (Liu et al. 2023), section 3; "The Llama 3 Herd of Models" (2024), 3.3.2.
"""

import math

import torch


def ring_attention(q, k, v, comm, zigzag=False):
    """Return causal attention of this rank's tokens, (B, H, T/N, D) each."""
    return RingAttention.apply(q, k, v, comm, zigzag)


def pass_on(comm, x):
    """Begin to send x to the next rank. Returns what waits for the tensor that the rank before sends."""
    N, r = comm.world_size, comm.rank
    return comm.send_recv(x, (r + 1) % N, x, (r - 1) % N, async_op=True).wait if N > 1 else lambda: x


def seen(r, s, T, zigzag):
    """Return (rows, keys, causal): which of rank r's T queries see which keys of rank s; causal if r = s."""
    everything = slice(0, T)
    if s == r:  # in zig-zag order, too: the second chunk is later than the first
        return everything, everything, True
    if zigzag:  # an earlier rank's first chunk is before all queries here, its second after all; and so on
        return (everything, slice(0, T // 2), False) if s < r else (slice(T // 2, T), everything, False)
    return (everything, everything, False) if s < r else (slice(0, 0), everything, False)


def scores(q, k, causal):
    """Return S of a block, with −∞ where a query does not see a key."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    return s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf) if causal else s


class RingAttention(torch.autograd.Function):
    """Compute attention while k and v go around; backward sends them around again, with their gradients."""

    @staticmethod
    def forward(ctx, q, k, v, comm, zigzag):
        out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -math.inf)
        kv, N, r = torch.stack((k, v)), comm.world_size, comm.rank
        for step in range(N):  # the block here is of rank r − step
            arrived = pass_on(comm, kv) if step < N - 1 else None
            rows, keys, causal = seen(r, (r - step) % N, q.shape[2], zigzag)
            s = scores(q[:, :, rows], kv[0][:, :, keys], causal)
            block_lse = s.logsumexp(-1, keepdim=True)
            block_out = (s - block_lse).exp() @ kv[1][:, :, keys]
            new_lse = lse[:, :, rows].logaddexp(block_lse)
            old = (lse[:, :, rows] - new_lse).exp() * out[:, :, rows]
            out[:, :, rows], lse[:, :, rows] = old + (block_lse - new_lse).exp() * block_out, new_lse
            kv = arrived() if arrived else None
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.comm, ctx.zigzag = comm, zigzag
        return out

    @staticmethod
    def backward(ctx, d_out):
        (q, k, v, out, lse), comm, scale = ctx.saved_tensors, ctx.comm, ctx.saved_tensors[0].shape[-1] ** -0.5
        delta, dq, kv = (d_out * out).sum(-1, keepdim=True), torch.zeros_like(q), torch.stack((k, v))
        N, r, sum_arrived = comm.world_size, comm.rank, lambda: 0
        for step in range(N):
            arrived = pass_on(comm, kv) if step < N - 1 else None
            rows, keys, causal = seen(r, (r - step) % N, q.shape[2], ctx.zigzag)
            p = (scores(q[:, :, rows], kv[0][:, :, keys], causal) - lse[:, :, rows]).exp()
            ds = p * (d_out[:, :, rows] @ kv[1][:, :, keys].mT - delta[:, :, rows]) * scale
            dq[:, :, rows] += ds @ kv[0][:, :, keys]
            d_kv = torch.zeros_like(kv)
            d_kv[:, :, :, keys] = torch.stack((ds.mT @ q[:, :, rows], p.mT @ d_out[:, :, rows]))
            sum_arrived = pass_on(comm, d_kv + sum_arrived())  # of the keys that are here: it follows them
            kv = arrived() if arrived else None
        return dq, *sum_arrived(), None, None
