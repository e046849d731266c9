"""FlashAttention's forward as a Triton kernel: `tiled.py`, with one program for each tile of queries of each head.

The program holds its tile of Q and the running m, l and O in registers, and passes over the keys that its queries see.
Nothing of size T × S leaves the chip: besides the output it writes 4 bytes per row, the logsumexp.

    c = scale · log2 e
    m' = max(m, c · rowmax(S))        P = 2^(c·S − m')        α = 2^(m − m')
    l' = α · l + rowsum(P)            O' = α · O + P V
    out = O / l                       lse2 = m + log2 l

with S = Q Kᵀ. The scale is folded with log2 e into one constant and multiplied after the row maximum, so that c·S − m'
is a single fused multiply-add for each weight. FlashAttention-2 (Dao 2023), section 3.1 and algorithm 1. With a hook
(`kernels/score.py`) S is what it gives, and c = log2 e. A sink is seen before the first key: m = sink · log2 e, l = 1.

The one step past a plain loop over all keys is `key_range`: tiles that none of the queries sees, above the diagonal or
outside the window, are skipped. All others are masked. A loop without a mask for the tiles inside the band, and another
for its edges, would save a comparison for each weight; but with two loops on one accumulator ptxas makes the matrix
products of an H100 wait for one another (its remark C7515), which costs far more.
"""

import triton
import triton.language as tl

from .call.arguments import empty_outputs
from .kernels.configs import config_for
from .kernels.score import changed, in_base_2, last_key, seen_by, sees_something
from .kernels.tile import (
    INF,
    LOG2E,
    Heads,
    Launch,
    dropout_scale,
    dropped,
    key_range,
    load,
    place,
    sequence,
    start,
    store,
)


@triton.jit
def forward_kernel(q, k, v, out, lse, sinks, packed, band, heads, group, scale, dropout, score, D: tl.constexpr,
                   BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
                   BLOCK_N: tl.constexpr):
    """Compute one tile of BLOCK_M queries. The last tiles, which see most keys under a causal mask, start first."""
    tile, head, index = place(band.T, BLOCK_M, heads)
    batch, first_row, T, first_key, S = sequence(packed, band, index)
    row = tile * BLOCK_M
    if row < T:
        q_ptr, out_ptr, lse_ptr = (start(q, batch, head, first_row), start(out, batch, head, first_row),
                                   start(lse, batch, head, first_row))
        k_ptr, v_ptr = start(k, batch, head // group, first_key), start(v, batch, head // group, first_key)
        c = in_base_2(scale, score)
        q_MD = load(q, q_ptr, row, T, D, BLOCK_M, BLOCK_D)
        m_M = tl.full([BLOCK_M], -INF, tl.float32)
        l_M = tl.zeros([BLOCK_M], tl.float32)
        if sinks is not None:
            # a sink is the key that was seen first: its weight is 2^0 at m = sink
            m_M = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
            l_M = tl.full([BLOCK_M], 1.0, tl.float32)
        acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        rows = row + tl.arange(0, BLOCK_M)
        first, end = key_range(row, tl.minimum(row + BLOCK_M, T), T, S, band, BLOCK_N)
        end = last_key(end, row + BLOCK_M - 1, T, S, score, index)
        for key in tl.range(first, end, BLOCK_N):
            k_ND = load(k, k_ptr, key, S, D, BLOCK_N, BLOCK_D)
            s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
            keys = key + tl.arange(0, BLOCK_N)
            s_MN = changed(s_MN, score, scale, head, rows[:, None], keys[None, :], T, S)
            s_MN = tl.where(seen_by(rows[:, None], keys[None, :], T, S, band, score, index), s_MN, -INF)
            m_new_M = tl.maximum(m_M, c * tl.max(s_MN, 1))
            base_M = tl.where(m_new_M == -INF, 0.0, m_new_M)  # −∞ − (−∞) is NaN, and 2^(−∞ − 0) is 0
            p_MN = tl.exp2(s_MN * c - base_M[:, None])
            shrink_M = tl.exp2(m_M - base_M)
            l_M = l_M * shrink_M + tl.sum(p_MN, 1)  # before dropout, which comes after the softmax
            if dropout is not None:
                p_MN = tl.where(dropped(dropout, batch * heads + head, first_row + row, first_key + key, packed,
                                        BLOCK_M, BLOCK_N), 0.0, p_MN)
            v_NV = load(v, v_ptr, key, S, V, BLOCK_N, BLOCK_V)
            # 16-bit operands, fp32 sums
            acc_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, acc_MV * shrink_M[:, None], input_precision="ieee")
            m_M = m_new_M
        seeing_M = sees_something(l_M, rows, T, S, band, score, sinks)
        l_M = tl.where(seeing_M, l_M, 1.0)  # 0 / 1 for rows that see no key, where 0 / 0 would be NaN
        store(out, out_ptr, row, T, acc_MV / l_M[:, None] * dropout_scale(dropout), V, BLOCK_M, BLOCK_V)
        lse_M = tl.where(seeing_M, tl.where(m_M == -INF, 0.0, m_M) + tl.log2(l_M), -INF)
        store(lse, lse_ptr, row, T, lse_M[:, None], 1, BLOCK_M, 1)


def forward(q_BHTD, k_BGSD, v_BGSV, problem, config=None):
    """Return (out_BHTV, lse2_BHT): the output in q's dtype, and the base-2 logsumexp of each row in fp32.

    `problem`: a `Problem`; `config`: a `Config`, by default the table's.
    """
    out_BHTV, lse2_BHT = empty_outputs(q_BHTD, v_BGSV.shape[-1])
    config = config or config_for("forward", q_BHTD, v_BGSV, problem)
    forward_launch(q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse2_BHT, problem, config).run(q_BHTD.device)
    return out_BHTV, lse2_BHT


def forward_launch(q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse2_BHT, problem, config):
    """Return the Launch of a forward."""
    tensors = {"q": q_BHTD, "k": k_BGSD, "v": v_BGSV, "out": out_BHTV, "lse": lse2_BHT}
    return Launch(forward_kernel, triton.cdiv(problem.band.T, config.block_m) * q_BHTD.shape[1] * problem.count, {
        **{name: Heads.of(x) for name, x in tensors.items()}, "sinks": problem.sinks,
        **problem.arguments(q_BHTD, v_BGSV), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}, config)
