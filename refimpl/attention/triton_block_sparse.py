"""Block-sparse attention as Triton kernels: the loops of the dense ones, over the lists of a mask.

    for block in list:  for each tile of the block:  as in `triton_forward` and `triton_backward`

A program has a tile of queries (forward, dQ), or of keys (dK and dV, by the transposed lists), inside of one block. It
passes the full blocks first, whose scores need no mask, then the partial ones with the bits of their pattern. What is
not listed is not loaded. Each element is written once, by one program: two runs are equal bit by bit.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .call.arguments import empty_outputs
from .call.sequences import Band
from .kernels.configs import INTERPRETED, Config, chip_of, look_up
from .kernels.score import changed, differentiated, in_base_2, seen_by
from .kernels.tile import INF, Heads, Launch, Score, load, padded, place, start, store
from .masks import BlockLists


class Lists(NamedTuple):
    """A mask's BlockLists as a kernel takes them: that of a block of queries, or keys, is number batch · `batch` + head
    · `head` + block; strides are 0 where lists are shared."""

    ends: torch.Tensor
    full: torch.Tensor
    blocks: torch.Tensor
    patterns: torch.Tensor
    words: torch.Tensor
    batch: int
    head: int


@triton.jit
def span(lists, batch, head, block):
    """Return (first, end of the full ones, end) of a list's blocks."""
    owner = batch * lists.batch + head * lists.head + block
    return tl.load(lists.ends + owner), tl.load(lists.full + owner), tl.load(lists.ends + owner + 1)


@triton.jit
def bits(lists, at, row, column, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (ROWS, COLUMNS) booleans of partial block number `at` of the lists, from (row, column) on."""
    words: tl.constexpr = BLOCK // 32
    pattern = tl.cast(tl.load(lists.patterns + at), tl.int64) * BLOCK * words
    rows, columns = row + tl.arange(0, ROWS), column // 32 + tl.arange(0, COLUMNS // 32)
    word = tl.load(lists.words + pattern + rows[:, None] * words + columns[None, :])
    bit = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
    return bit.reshape(ROWS, COLUMNS) != 0


@triton.jit
def online(q_MD, k, k_ptr, v, v_ptr, m_M, l_M, acc_MV, lists, begin, end, row, head, batch, T, S, band, scale, score,
           D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_PARTIAL: tl.constexpr):
    """Pass blocks begin … end − 1 of the lists by a tile of queries; return the new (m, l, acc)."""
    rows, c = row + tl.arange(0, BLOCK_M), in_base_2(scale, score)
    tiles: tl.constexpr = BLOCK // BLOCK_N
    for n in tl.range(begin * tiles, end * tiles):
        at, inner = n // tiles, n % tiles * BLOCK_N
        key = tl.load(lists.blocks + at) * BLOCK + inner
        keys = key + tl.arange(0, BLOCK_N)
        k_ND = load(k, k_ptr, key, S, D, BLOCK_N, BLOCK_D)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
        s_MN = changed(s_MN, score, scale, head, rows[:, None], keys[None, :], T, S)
        seen_MN = seen_by(rows[:, None], keys[None, :], T, S, band, score, batch)
        if IS_PARTIAL:
            seen_MN = seen_MN & bits(lists, at, row % BLOCK, inner, BLOCK, BLOCK_M, BLOCK_N)
        s_MN = tl.where(seen_MN, s_MN, -INF)
        m_new_M = tl.maximum(m_M, tl.max(s_MN, 1) * c)
        base_M = tl.where(m_new_M == -INF, 0.0, m_new_M)  # −∞ − (−∞) is NaN, and 2^(−∞ − 0) is 0
        p_MN = tl.exp2(s_MN * c - base_M[:, None])
        shrink_M = tl.exp2(m_M - base_M)
        l_M = l_M * shrink_M + tl.sum(p_MN, 1)
        v_NV = load(v, v_ptr, key, S, V, BLOCK_N, BLOCK_V)
        acc_MV = tl.dot(p_MN.to(v_NV.dtype), v_NV, acc_MV * shrink_M[:, None], input_precision="ieee")
        m_M = m_new_M
    return m_M, l_M, acc_MV


@triton.jit
def sparse_forward_kernel(q, k, v, out, lse, lists, band, heads, group, scale, score, D: tl.constexpr,
                          BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute one tile of BLOCK_M queries."""
    tile, head, batch = place(band.T, BLOCK_M, heads)
    row, T, S = tile * BLOCK_M, band.T, band.S
    k_ptr, v_ptr = start(k, batch, head // group, 0), start(v, batch, head // group, 0)
    q_MD = load(q, start(q, batch, head, 0), row, T, D, BLOCK_M, BLOCK_D)
    m_M, l_M = tl.full([BLOCK_M], -INF, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    first, full, end = span(lists, batch, head, row // BLOCK)
    m_M, l_M, acc_MV = online(q_MD, k, k_ptr, v, v_ptr, m_M, l_M, acc_MV, lists, first, full, row, head, batch, T, S,
                              band, scale, score, D, BLOCK_D, V, BLOCK_V, BLOCK, BLOCK_M, BLOCK_N, False)
    m_M, l_M, acc_MV = online(q_MD, k, k_ptr, v, v_ptr, m_M, l_M, acc_MV, lists, full, end, row, head, batch, T, S,
                              band, scale, score, D, BLOCK_D, V, BLOCK_V, BLOCK, BLOCK_M, BLOCK_N, True)
    seeing_M = l_M != 0
    l_M = tl.where(seeing_M, l_M, 1.0)  # 0 / 1 for rows that see no key, where 0 / 0 would be NaN
    store(out, start(out, batch, head, 0), row, T, acc_MV / l_M[:, None], V, BLOCK_M, BLOCK_V)
    lse_M = tl.where(seeing_M, tl.where(m_M == -INF, 0.0, m_M) + tl.log2(l_M), -INF)
    store(lse, start(lse, batch, head, 0), row, T, lse_M[:, None], 1, BLOCK_M, 1)


@triton.jit
def over_queries(k_ND, v_NV, q, q_ptr, d_out, d_out_ptr, lse, lse_ptr, delta, delta_ptr, dk_ND, dv_NV, lists, begin,
                 end, key, head, batch, T, S, band, scale, score, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
                 BLOCK_N: tl.constexpr, IS_PARTIAL: tl.constexpr):
    """Pass blocks begin … end − 1 of the transposed lists by a tile of keys; return the new (dK, dV)."""
    keys = key + tl.arange(0, BLOCK_N)
    tiles: tl.constexpr = BLOCK // BLOCK_M
    for n in tl.range(begin * tiles, end * tiles):
        at, inner = n // tiles, n % tiles * BLOCK_M
        row = tl.load(lists.blocks + at) * BLOCK + inner
        rows = row + tl.arange(0, BLOCK_M)
        q_MD = load(q, q_ptr, row, T, D, BLOCK_M, BLOCK_D)
        lse_M = tl.load(lse_ptr + rows * lse.row, mask=rows < T, other=INF)  # 2^−∞ = 0: no row is there
        s_NM = tl.dot(k_ND, q_MD.T, input_precision="ieee")
        new_NM = changed(s_NM, score, scale, head, rows[None, :], keys[:, None], T, S)
        p_NM = tl.exp2(new_NM * in_base_2(scale, score) - lse_M[None, :])
        seen_NM = seen_by(rows[None, :], keys[:, None], T, S, band, score, batch)
        if IS_PARTIAL:
            seen_NM = seen_NM & bits(lists, at, inner, key % BLOCK, BLOCK, BLOCK_M, BLOCK_N).trans()
        p_NM = tl.where(seen_NM, p_NM, 0.0)  # after 2^x: what is not seen may be anything before
        d_o_MV = load(d_out, d_out_ptr, row, T, V, BLOCK_M, BLOCK_V)
        dp_NM = tl.dot(v_NV, d_o_MV.T, input_precision="ieee")
        dv_NV = tl.dot(p_NM.to(q_MD.dtype), d_o_MV, dv_NV, input_precision="ieee")
        delta_M = tl.load(delta_ptr + rows * delta.row, mask=rows < T, other=0.0)
        ds_NM = differentiated(p_NM * (dp_NM - delta_M[None, :]), s_NM, score, scale)
        dk_ND = tl.dot(ds_NM.to(q_MD.dtype), q_MD, dk_ND, input_precision="ieee")
    return dk_ND, dv_NV


@triton.jit
def sparse_dkdv_kernel(q, k, v, d_out, lse, delta, dk, dv, lists, band, heads, group, scale, score, D: tl.constexpr,
                       BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute dK and dV of one tile of BLOCK_N keys, by the transposed lists; matrices are transposed, (N, M)."""
    tile, key_head, batch = place(band.S, BLOCK_N, heads // group)
    key, T, S = tile * BLOCK_N, band.T, band.S
    k_ND = load(k, start(k, batch, key_head, 0), key, S, D, BLOCK_N, BLOCK_D)
    v_NV = load(v, start(v, batch, key_head, 0), key, S, V, BLOCK_N, BLOCK_V)
    dk_ND, dv_NV = tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for head in range(key_head * group, key_head * group + group):  # its group's heads add here
        q_ptr, d_out_ptr = start(q, batch, head, 0), start(d_out, batch, head, 0)
        lse_ptr, delta_ptr = start(lse, batch, head, 0), start(delta, batch, head, 0)
        first, full, end = span(lists, batch, head, key // BLOCK)
        dk_ND, dv_NV = over_queries(
            k_ND, v_NV, q, q_ptr, d_out, d_out_ptr, lse, lse_ptr, delta, delta_ptr, dk_ND, dv_NV, lists, first, full,
            key, head, batch, T, S, band, scale, score, D, BLOCK_D, V, BLOCK_V, BLOCK, BLOCK_M, BLOCK_N, False)
        dk_ND, dv_NV = over_queries(
            k_ND, v_NV, q, q_ptr, d_out, d_out_ptr, lse, lse_ptr, delta, delta_ptr, dk_ND, dv_NV, lists, full, end,
            key, head, batch, T, S, band, scale, score, D, BLOCK_D, V, BLOCK_V, BLOCK, BLOCK_M, BLOCK_N, True)
    store(dk, start(dk, batch, key_head, 0), key, S, dk_ND * scale, D, BLOCK_N, BLOCK_D)
    store(dv, start(dv, batch, key_head, 0), key, S, dv_NV, V, BLOCK_N, BLOCK_V)


@triton.jit
def over_keys(q_MD, d_o_MV, lse_M, delta_M, k, k_ptr, v, v_ptr, dq_MD, lists, begin, end, row, head, batch, T, S, band,
              scale, score, D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
              BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_PARTIAL: tl.constexpr):
    """Pass blocks begin … end − 1 of the lists by a tile of queries; return the new dQ."""
    rows = row + tl.arange(0, BLOCK_M)
    tiles: tl.constexpr = BLOCK // BLOCK_N
    for n in tl.range(begin * tiles, end * tiles):
        at, inner = n // tiles, n % tiles * BLOCK_N
        key = tl.load(lists.blocks + at) * BLOCK + inner
        keys = key + tl.arange(0, BLOCK_N)
        k_ND, v_NV = load(k, k_ptr, key, S, D, BLOCK_N, BLOCK_D), load(v, v_ptr, key, S, V, BLOCK_N, BLOCK_V)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
        new_MN = changed(s_MN, score, scale, head, rows[:, None], keys[None, :], T, S)
        p_MN = tl.exp2(new_MN * in_base_2(scale, score) - lse_M[:, None])
        dp_MN = tl.dot(d_o_MV, v_NV.T, input_precision="ieee")
        ds_MN = differentiated(p_MN * (dp_MN - delta_M[:, None]), s_MN, score, scale)
        seen_MN = seen_by(rows[:, None], keys[None, :], T, S, band, score, batch)
        if IS_PARTIAL:
            seen_MN = seen_MN & bits(lists, at, row % BLOCK, inner, BLOCK, BLOCK_M, BLOCK_N)
        dq_MD = tl.dot(tl.where(seen_MN, ds_MN, 0.0).to(k_ND.dtype), k_ND, dq_MD, input_precision="ieee")
    return dq_MD


@triton.jit
def sparse_dq_kernel(q, k, v, d_out, lse, delta, dq, lists, band, heads, group, scale, score, D: tl.constexpr,
                     BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr,
                     BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Compute dQ of one tile of BLOCK_M queries: the forward's loops over the lists."""
    tile, head, batch = place(band.T, BLOCK_M, heads)
    row, T, S = tile * BLOCK_M, band.T, band.S
    rows = row + tl.arange(0, BLOCK_M)
    k_ptr, v_ptr = start(k, batch, head // group, 0), start(v, batch, head // group, 0)
    q_MD = load(q, start(q, batch, head, 0), row, T, D, BLOCK_M, BLOCK_D)
    d_o_MV = load(d_out, start(d_out, batch, head, 0), row, T, V, BLOCK_M, BLOCK_V)
    lse_M = tl.load(start(lse, batch, head, 0) + rows * lse.row, mask=rows < T, other=INF)
    delta_M = tl.load(start(delta, batch, head, 0) + rows * delta.row, mask=rows < T, other=0.0)
    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first, full, end = span(lists, batch, head, row // BLOCK)
    dq_MD = over_keys(q_MD, d_o_MV, lse_M, delta_M, k, k_ptr, v, v_ptr, dq_MD, lists, first, full, row, head, batch, T,
                      S, band, scale, score, D, BLOCK_D, V, BLOCK_V, BLOCK, BLOCK_M, BLOCK_N, False)
    dq_MD = over_keys(q_MD, d_o_MV, lse_M, delta_M, k, k_ptr, v, v_ptr, dq_MD, lists, full, end, row, head, batch, T, S,
                      band, scale, score, D, BLOCK_D, V, BLOCK_V, BLOCK, BLOCK_M, BLOCK_N, True)
    store(dq, start(dq, batch, head, 0), row, T, dq_MD * scale, D, BLOCK_M, BLOCK_D)


# --- launches --------------------------------------------------------------------------------------------------------


class SparseProblem(NamedTuple):
    """What the kernels are to compute, besides the tensors: `by_query`, `by_key`: Lists."""

    scale: float
    by_query: Lists
    by_key: Lists
    block: int
    score: Score = Score()

    @classmethod
    def of(cls, by_query, by_key, words, block, shape, lengths, scale, score):
        """Make one of the arguments of an operator. `shape`: (batch, heads) that have lists of their own; `lengths`:
        (T, S)."""
        (batch, heads), lists = shape, []
        for whole, length in zip((by_query, by_key), lengths, strict=True):
            count = triton.cdiv(length, block)
            ends, full, blocks, patterns, _ = BlockLists.of(whole, batch * heads * count)
            lists.append(Lists(ends, full, blocks, patterns, words, 0 if batch == 1 else heads * count,
                               0 if heads == 1 else count))
        return cls(scale, *lists, block, Score.of(*score))

    def arguments(self, q_BHTD, k_BGSD, v_BGSV, lists, config):
        """Return what a kernel is launched with besides its tensors."""
        (_, H, T, D), (G, S, V) = q_BHTD.shape, v_BGSV.shape[1:]
        return {"lists": lists, "band": Band(T, S), "heads": H, "group": H // G, "scale": self.scale,
                "score": self.score, "D": D, "BLOCK_D": padded(D), "V": V, "BLOCK_V": padded(V), "BLOCK": self.block,
                "BLOCK_M": config.block_m, "BLOCK_N": config.block_n}


def sparse_config(kernel, q_BHTD, v_BGSV, block):
    """Return the dense kernel's Config, its tile no larger than a block, and its columns whole words of bits."""
    config = INTERPRETED
    if q_BHTD.device.type != "cpu":
        D = max(q_BHTD.shape[-1], v_BGSV.shape[-1])
        config = look_up(kernel, chip_of(q_BHTD.device), q_BHTD.dtype.itemsize, D)
    return fitted(config, block)


def fitted(config: Config, block: int) -> Config:
    """Return a Config whose tile lies inside of a block, and has whole words of bits."""
    return config._replace(block_m=min(config.block_m, block), block_n=min(max(config.block_n, 32), block))


def forward(q_BHTD, k_BGSD, v_BGSV, problem, config=None):
    """Return (out_BHTV, lse2_BHT): the output in q's dtype, and the base-2 logsumexp of each row in fp32."""
    out_BHTV, lse2_BHT = empty_outputs(q_BHTD, v_BGSV.shape[-1])
    config = config or sparse_config("forward", q_BHTD, v_BGSV, problem.block)
    forward_launch(q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse2_BHT, problem, config).run(q_BHTD.device)
    return out_BHTV, lse2_BHT


def forward_launch(q_BHTD, k_BGSD, v_BGSV, out_BHTV, lse2_BHT, problem, config):
    """Return the Launch of a forward."""
    B, H, T, _ = q_BHTD.shape
    tensors = {"q": q_BHTD, "k": k_BGSD, "v": v_BGSV, "out": out_BHTV, "lse": lse2_BHT}
    return Launch(sparse_forward_kernel, triton.cdiv(T, config.block_m) * H * B, {
        **{name: Heads.of(x) for name, x in tensors.items()},
        **problem.arguments(q_BHTD, k_BGSD, v_BGSV, problem.by_query, config)}, config)


def backward(d_out_BHTV, q_BHTD, k_BGSD, v_BGSV, lse2_BHT, delta_BHT, problem, configs=None):
    """Return (dq_BHTD, dk_BGSD, dv_BGSV) in q's dtype, with the memory layout of q, k and v."""
    found = tuple(map(torch.empty_like, (q_BHTD, k_BGSD, v_BGSV)))
    configs = configs or [sparse_config(name, q_BHTD, v_BGSV, problem.block) for name in ("dkdv", "dq")]
    for launch in backward_launches(d_out_BHTV, q_BHTD, k_BGSD, v_BGSV, lse2_BHT, delta_BHT, *found, problem, configs):
        launch.run(q_BHTD.device)
    return found


def backward_launches(d_out_BHTV, q_BHTD, k_BGSD, v_BGSV, lse2_BHT, delta_BHT, dq_BHTD, dk_BGSD, dv_BGSV, problem,
                      configs):
    """Return the Launches of dK with dV, and of dQ."""
    (B, H, T, _), (G, S), (by_key, by_row) = q_BHTD.shape, k_BGSD.shape[1:3], configs
    given = {"q": q_BHTD, "k": k_BGSD, "v": v_BGSV, "d_out": d_out_BHTV, "lse": lse2_BHT, "delta": delta_BHT}

    def launch(kernel, programs, lists, config, **written):
        tensors = {name: Heads.of(x) for name, x in {**given, **written}.items()}
        return Launch(kernel, programs * B, {
            **tensors, **problem.arguments(q_BHTD, k_BGSD, v_BGSV, lists, config)}, config)

    return (launch(sparse_dkdv_kernel, triton.cdiv(S, by_key.block_n) * G, problem.by_key, by_key, dk=dk_BGSD,
                   dv=dv_BGSV),
            launch(sparse_dq_kernel, triton.cdiv(T, by_row.block_m) * H, problem.by_query, by_row, dq=dq_BHTD))
