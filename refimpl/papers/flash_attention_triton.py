"""FlashAttention's forward in one screen of Triton: `flash_attention` as a kernel, a tile of it in a GPU's registers.

A kernel runs as many programs at once, and each is told its number. Here program (i, h) computes the output of the i-th
tile of M queries of head h: it loads them once, passes over tiles of N keys, and writes M rows of O and of L. A tile of
scores and the running values never leave the chip. Attention in plain PyTorch writes all T² scores to memory and reads
them back, several times.

    c = log2(e) / √D        e^x = 2^(x · log2 e), and 2^x is one instruction of the GPU
    m' = max(m, c · rowmax(S))          P = 2^(c·S − m')          α = 2^(m − m')
    l' = α l + rowsum(P)                O' = α O + P V

with S = Q Kᵀ. At the end O / l is the output, and L = (m + log2 l) · ln 2 the logsumexp. "FlashAttention-2" (Dao 2023),
algorithm 1. With TRITON_INTERPRET=1 in the environment before Triton is imported it runs on a CPU, in fp32.
"""

import torch
import triton
import triton.language as tl

M, N = 128, 64  # queries and keys of a tile: powers of two, at least 16
WARPS = 8  # of 32 threads, which compute one program; their registers hold Q, S, P and O
LOG2E, LN2 = 1.4426950408889634, tl.constexpr(0.6931471805599453)


@triton.jit
def forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, T, c, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Compute M rows of the output. Tensors are (B·H, T, D) in memory, row after row; L is (B·H, T)."""
    tile, head = tl.program_id(0), tl.program_id(1).to(tl.int64)  # 64 bits: a tensor may have more than 2³¹ elements
    rows_M, columns_D = tile * M + tl.arange(0, M), tl.arange(0, D)
    at_MD = head * T * D + rows_M[:, None] * D + columns_D[None, :]  # where this tile of Q begins, and that of O
    q_MD = tl.load(q_ptr + at_MD, mask=rows_M[:, None] < T, other=0.0)
    m_M, l_M = tl.full([M], -float("inf"), tl.float32), tl.zeros([M], tl.float32)
    o_MD = tl.zeros([M, D], tl.float32)
    for key in range(0, tl.minimum(tile * M + M, T), N):  # no query of this tile sees a later key
        keys_N = key + tl.arange(0, N)
        at_ND = head * T * D + keys_N[:, None] * D + columns_D[None, :]
        k_ND = tl.load(k_ptr + at_ND, mask=keys_N[:, None] < T, other=0.0)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
        s_MN = tl.where(keys_N[None, :] <= rows_M[:, None], s_MN, -float("inf"))  # causal
        m_new_M = tl.maximum(m_M, c * tl.max(s_MN, 1))
        p_MN, shrink_M = tl.exp2(s_MN * c - m_new_M[:, None]), tl.exp2(m_M - m_new_M)
        l_M = l_M * shrink_M + tl.sum(p_MN, 1)
        v_ND = tl.load(v_ptr + at_ND, mask=keys_N[:, None] < T, other=0.0)
        o_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, o_MD * shrink_M[:, None], input_precision="ieee")
        m_M = m_new_M
    tl.store(out_ptr + at_MD, o_MD / l_M[:, None], mask=rows_M[:, None] < T)
    tl.store(lse_ptr + head * T + rows_M, (m_M + tl.log2(l_M)) * LN2, mask=rows_M < T)


def attention(q, k, v):
    """Return (O, L) of causal attention: contiguous q, k, v (B, H, T, D) -> (B, H, T, D) in q's dtype and (B, H, T) in
    fp32. D is a power of two, at least 16; tiles and warps are right for 16-bit numbers and D up to 128."""
    (B, H, T, D), out = q.shape, torch.empty_like(q)
    lse = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    c = D**-0.5 * LOG2E
    forward_kernel[triton.cdiv(T, M), B * H](q, k, v, out, lse, T, c, D, M, N, num_warps=WARPS)
    return out, lse
