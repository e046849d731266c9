"""FlashAttention's backward as Triton kernels: P is computed again from Q, K and the logsumexp, tile by tile.

    Δ = rowsum(dO ∘ O)        P = 2^(c·S − lse2)        dP = dO Vᵀ        dS = P ∘ (dP − Δ)
    dV = Pᵀ dO                dK = scale · dSᵀ Q         dQ = scale · dS K

dK and dV sum over queries, dQ over keys. One kernel for all three would have to add to one of them from many programs
at once, in an order that changes from run to run. So there are two: `dkdv_kernel` holds a tile of keys and passes over
the queries (of all heads that share the keys), `dq_kernel` holds a tile of queries and passes over the keys. S and dP
are computed in both, 7 matrix products in place of 5; in exchange each element is written once, by one program, and
two runs are equal bit by bit.

Masks are applied after the exponent: S − lse2 of a pair that is not seen may be anything, and P or dS there is set
to 0. A hook (`kernels/score.py`) changes S before the exponent, and dS is multiplied by its derivative.
FlashAttention-2 (Dao 2023), section 3.1.2 and algorithm 2; there the loops add to dQ atomically.
"""

import torch
import triton
import triton.language as tl

from .kernels.configs import DELTA, config_for
from .kernels.score import changed, differentiated, first_row, in_base_2, last_key, seen_by
from .kernels.tile import (
    INF,
    LOG2E,
    Heads,
    Launch,
    dropout_scale,
    dropped,
    key_range,
    load,
    padded,
    place,
    row_range,
    sequence,
    start,
    store,
)


@triton.jit
def delta_kernel(out, d_out, d_lse, delta, T, heads, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Compute Δ = rowsum(dO ∘ O) of each row in fp32, less the logsumexp's own gradient, since ∂lse/∂S = P, too."""
    tile, head, batch = place(T, BLOCK_M, heads)
    row = tile * BLOCK_M
    o_MD = load(out, start(out, batch, head, 0), row, T, D, BLOCK_M, BLOCK_D).to(tl.float32)
    d_o_MD = load(d_out, start(d_out, batch, head, 0), row, T, D, BLOCK_M, BLOCK_D).to(tl.float32)
    delta_M1 = tl.sum(o_MD * d_o_MD, 1)[:, None]
    if d_lse is not None:
        delta_M1 -= load(d_lse, start(d_lse, batch, head, 0), row, T, 1, BLOCK_M, 1) * LOG2E  # of lse2, in base 2
    store(delta, start(delta, batch, head, 0), row, T, delta_M1, 1, BLOCK_M, 1)


@triton.jit
def dkdv_kernel(q, k, v, d_out, lse, delta, dk, dv, packed, band, heads, group, scale, dropout, score, D: tl.constexpr,
                BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr):
    """Compute dK and dV of one tile of BLOCK_N keys: a loop over the heads of its group, and one over their queries.

    All matrices are transposed, (N, M), so that P and dS are in the right registers for the next product.
    """
    tiles = tl.cdiv(band.S, BLOCK_N)
    tile, key_head, index = place(band.S, BLOCK_N, heads // group)
    batch, top_row, T, first_key, S = sequence(packed, band, index)
    key = (tiles - 1 - tile) * BLOCK_N  # under a causal mask the first keys are seen by most
    if key < S:
        k_ptr, v_ptr = start(k, batch, key_head, first_key), start(v, batch, key_head, first_key)
        k_ND, v_NV = load(k, k_ptr, key, S, D, BLOCK_N, BLOCK_D), load(v, v_ptr, key, S, V, BLOCK_N, BLOCK_V)
        dk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_NV = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        keys = key + tl.arange(0, BLOCK_N)
        begin, end = row_range(key, tl.minimum(key + BLOCK_N, S), T, S, band)
        begin = first_row(begin, key, T, S, score, index)
        # its group's heads add here: no atomics between them
        for head in range(key_head * group, key_head * group + group):
            q_ptr, d_out_ptr = start(q, batch, head, top_row), start(d_out, batch, head, top_row)
            lse_ptr, delta_ptr = start(lse, batch, head, top_row), start(delta, batch, head, top_row)
            for row in tl.range(begin, end, BLOCK_M):
                rows = row + tl.arange(0, BLOCK_M)
                q_MD = load(q, q_ptr, row, T, D, BLOCK_M, BLOCK_D)
                lse_M = tl.load(lse_ptr + rows * lse.row, mask=rows < T, other=INF)  # 2^−∞ = 0: no row is there
                s_NM = tl.dot(k_ND, q_MD.T, input_precision="ieee")
                new_NM = changed(s_NM, score, scale, head, rows[None, :], keys[:, None], T, S)
                p_NM = tl.exp2(new_NM * in_base_2(scale, score) - lse_M[None, :])
                # after 2^x: what is not seen may be anything before
                p_NM = tl.where(seen_by(rows[None, :], keys[:, None], T, S, band, score, index), p_NM, 0.0)
                d_o_MV = load(d_out, d_out_ptr, row, T, V, BLOCK_M, BLOCK_V)
                dp_NM = tl.dot(v_NV, d_o_MV.T, input_precision="ieee")
                kept_NM = p_NM
                if dropout is not None:
                    out_NM = dropped(dropout, batch * heads + head, top_row + row, first_key + key, packed, BLOCK_M,
                                     BLOCK_N).trans()
                    kept_NM = tl.where(out_NM, 0.0, p_NM)
                    dp_NM = tl.where(out_NM, 0.0, dp_NM * dropout.scale)  # of O = (Z ∘ P) V / (1 − p)
                dv_NV = tl.dot(kept_NM.to(q_MD.dtype), d_o_MV, dv_NV, input_precision="ieee")
                delta_M = tl.load(delta_ptr + rows * delta.row, mask=rows < T, other=0.0)
                ds_NM = differentiated(p_NM * (dp_NM - delta_M[None, :]), s_NM, score, scale)
                dk_ND = tl.dot(ds_NM.to(q_MD.dtype), q_MD, dk_ND, input_precision="ieee")
        # the scale once, not for each score
        store(dk, start(dk, batch, key_head, first_key), key, S, dk_ND * scale, D, BLOCK_N, BLOCK_D)
        store(dv, start(dv, batch, key_head, first_key), key, S, dv_NV * dropout_scale(dropout), V, BLOCK_N, BLOCK_V)


@triton.jit
def dq_kernel(q, k, v, d_out, lse, delta, dq, packed, band, heads, group, scale, dropout, score, D: tl.constexpr,
              BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr):
    """Compute dQ of one tile of BLOCK_M queries: the forward's loop over the keys that it sees."""
    tile, head, index = place(band.T, BLOCK_M, heads)
    batch, top_row, T, first_key, S = sequence(packed, band, index)
    row = tile * BLOCK_M
    if row < T:
        rows = row + tl.arange(0, BLOCK_M)
        k_ptr, v_ptr = start(k, batch, head // group, first_key), start(v, batch, head // group, first_key)
        q_MD = load(q, start(q, batch, head, top_row), row, T, D, BLOCK_M, BLOCK_D)
        d_o_MV = load(d_out, start(d_out, batch, head, top_row), row, T, V, BLOCK_M, BLOCK_V)
        # 2^−∞ = 0: no row is there
        lse_M = tl.load(start(lse, batch, head, top_row) + rows * lse.row, mask=rows < T, other=INF)
        delta_M = tl.load(start(delta, batch, head, top_row) + rows * delta.row, mask=rows < T, other=0.0)
        dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        first, end = key_range(row, tl.minimum(row + BLOCK_M, T), T, S, band, BLOCK_N)
        end = last_key(end, row + BLOCK_M - 1, T, S, score, index)
        for key in tl.range(first, end, BLOCK_N):
            keys = key + tl.arange(0, BLOCK_N)
            k_ND, v_NV = (load(k, k_ptr, key, S, D, BLOCK_N, BLOCK_D), load(v, v_ptr, key, S, V, BLOCK_N, BLOCK_V))
            s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
            new_MN = changed(s_MN, score, scale, head, rows[:, None], keys[None, :], T, S)
            p_MN = tl.exp2(new_MN * in_base_2(scale, score) - lse_M[:, None])
            dp_MN = tl.dot(d_o_MV, v_NV.T, input_precision="ieee")
            if dropout is not None:
                out_MN = dropped(dropout, batch * heads + head, top_row + row, first_key + key, packed, BLOCK_M,
                                 BLOCK_N)
                dp_MN = tl.where(out_MN, 0.0, dp_MN * dropout.scale)
            ds_MN = differentiated(p_MN * (dp_MN - delta_M[:, None]), s_MN, score, scale)
            ds_MN = tl.where(seen_by(rows[:, None], keys[None, :], T, S, band, score, index), ds_MN, 0.0)
            dq_MD = tl.dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD, input_precision="ieee")
        store(dq, start(dq, batch, head, top_row), row, T, dq_MD * scale, D, BLOCK_M, BLOCK_D)


def delta(out_BHTD, d_out_BHTD, d_lse2_BHT=None):
    """Return Δ_BHT in fp32. `d_lse2_BHT`: the gradient of the base-2 logsumexp, if it has one."""
    delta_BHT = out_BHTD.new_empty(out_BHTD.shape[:3], dtype=torch.float32)
    delta_launch(out_BHTD, d_out_BHTD, d_lse2_BHT, delta_BHT, DELTA).run(out_BHTD.device)
    return delta_BHT


def delta_launch(out_BHTD, d_out_BHTD, d_lse2_BHT, delta_BHT, config):
    """Return the Launch of Δ."""
    B, H, T, D = out_BHTD.shape
    return Launch(delta_kernel, triton.cdiv(T, config.block_m) * H * B, {
        "out": Heads.of(out_BHTD), "d_out": Heads.of(d_out_BHTD),
        "d_lse": None if d_lse2_BHT is None else Heads.of(d_lse2_BHT), "delta": Heads.of(delta_BHT), "T": T, "heads": H,
        "D": D, "BLOCK_D": padded(D), "BLOCK_M": config.block_m}, config)


def backward(d_out_BHTV, q_BHTD, k_BGSD, v_BGSV, lse2_BHT, delta_BHT, problem, configs=None):
    """Return (dq_BHTD, dk_BGSD, dv_BGSV) in q's dtype, with the memory layout of q, k and v.

    `problem`: a `Problem`; `configs`: two `Config`, for the kernels dkdv and dq, by default the table's.
    """
    found = tuple(map(torch.empty_like, (q_BHTD, k_BGSD, v_BGSV)))  # each element is written once: no zeros are needed
    configs = configs or [config_for(name, q_BHTD, v_BGSV, problem) for name in ("dkdv", "dq")]
    for launch in backward_launches(d_out_BHTV, q_BHTD, k_BGSD, v_BGSV, lse2_BHT, delta_BHT, *found, problem, configs):
        launch.run(q_BHTD.device)
    return found


def backward_launches(d_out_BHTV, q_BHTD, k_BGSD, v_BGSV, lse2_BHT, delta_BHT, dq_BHTD, dk_BGSD, dv_BGSV, problem,
                      configs):
    """Return the Launches of dK with dV, and of dQ."""
    H, G, (by_key, by_row) = q_BHTD.shape[1], k_BGSD.shape[1], configs
    given = {"q": q_BHTD, "k": k_BGSD, "v": v_BGSV, "d_out": d_out_BHTV, "lse": lse2_BHT, "delta": delta_BHT}

    def launch(kernel, tiles, heads, config, **written):
        tensors = {name: Heads.of(x) for name, x in {**given, **written}.items()}
        return Launch(kernel, tiles * heads * problem.count, {
            **tensors, **problem.arguments(q_BHTD, v_BGSV), "BLOCK_M": config.block_m, "BLOCK_N": config.block_n},
            config)

    return (launch(dkdv_kernel, triton.cdiv(problem.band.S, by_key.block_n), G, by_key, dk=dk_BGSD, dv=dv_BGSV),
            launch(dq_kernel, triton.cdiv(problem.band.T, by_row.block_m), H, by_row, dq=dq_BHTD))
