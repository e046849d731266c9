"""The two warp groups that compute in `gluon_forward.py`: 64 rows of queries each, tile after tile of keys.

A step, from the scores of one tile to the next; on the right, what runs in the background:

    S' = Q K'ᵀ                  S'
    O += P V                    S', O
    wait for S'                     O
    m', l', P' = softmax(S')        O
    wait for O
    O *= 2^(m − m')

Shapes: R rows of a consumer, N keys of a tile, D the head_dim that is padded to.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .triton_hopper import place, turns


@gluon.jit
def keys_seen(row, S, edges, BM: gl.constexpr, BN: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Return (first, n): the BM rows from `row` on see n tiles of keys from `first` on; at least one."""
    below, above = edges
    first = gl.maximum(row + below, 0) // BN * BN if LEFT else 0
    end = gl.minimum(row + BM + above, S) if RIGHT else S
    return first, gl.maximum(gl.cdiv(end - first, BN), 1)


@gluon.jit
def attend(rings, out_buf, out_desc, lse2_ptr, sizes, edges, scale_log2, WHO: gl.constexpr, LEFT: gl.constexpr,
           RIGHT: gl.constexpr, TAIL: gl.constexpr):
    """Compute a consumer's turns: rows WHO · R … of each tile of queries."""
    q_buf, q_bars, k_buf, k_bars, v_buf, v_bars = rings
    B, H, G, T, S, section = sizes
    below, above = edges
    R: gl.constexpr = q_buf.shape[1]
    BM: gl.constexpr = 2 * R
    BN: gl.constexpr = k_buf.shape[1]
    rows: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
    q_full, q_empty = q_bars
    tiles = gl.cdiv(T, BM)
    step = 0  # tiles of keys so far, over all turns
    for turn in range(turns(B * H * tiles)):
        head, tile = place(turn, B * H, tiles, section)
        first, n = keys_seen(tile * BM, S, edges, BM, BN, LEFT, RIGHT)
        row = gl.maximum(tile, 0) * BM + WHO * R  # without maximum ptxas keeps `above` − 64 in memory, and spills
        row_R = row + gl.arange(0, R, layout=rows)
        end_R = gl.minimum(row_R + above + 1, S) if RIGHT else gl.full([R], S, gl.int32, layout=rows)
        mbarrier.wait(q_full.index(0), turn & 1)
        state = _all_but_the_last_product(q_buf.index(WHO), rings, step, row, S, edges, first, n,
                                          (row_R + below, end_R), scale_log2, LEFT, RIGHT, TAIL)
        mbarrier.arrive(q_empty.index(0), count=1)  # the last product reads P and V alone: the next Q may come
        step += n
        m_R, l_R, acc_RD = _last_product(v_buf, v_bars, step, state)
        out_RD = _quotient(acc_RD, l_R, end_R, RIGHT)
        _store(out_RD, out_buf.index(WHO), out_desc, [head // H, head % H, tile * BM + WHO * R, 0])
        gl.store(lse2_ptr + head.to(gl.int64) * T + row_R, m_R + gl.log2(l_R), mask=row_R < T)
    tma.store_wait(0)


@gluon.jit
def _all_but_the_last_product(q, rings, step, row, S, edges, first, n, seen, scale_log2, LEFT: gl.constexpr,
                              RIGHT: gl.constexpr, TAIL: gl.constexpr):
    """Return the state after n tiles of keys, without the last product. The last tiles may end beyond what some row
    sees, the first ones begin before it: only those are masked."""
    q_buf, q_bars, k_buf, k_bars, v_buf, v_bars = rings
    below, above = edges
    R: gl.constexpr = q.shape[0]
    BN: gl.constexpr = k_buf.shape[1]
    key = first + (n - 1) * BN
    state = _first_step(q, rings, step, key, seen, scale_log2, LEFT or RIGHT or TAIL, LEFT)
    whole, cut = n - 1, 0  # of the others, those before `whole` are not masked on the right; before `cut` on the left
    if RIGHT:
        whole = gl.minimum(whole, gl.maximum(gl.minimum(row + above + 1, S) - first, 0) // BN)
        for _ in range(n - 1 - whole):
            key -= BN
            step += 1
            state = _step(q, rings, step, key, seen, scale_log2, state, True, LEFT)
    if LEFT:
        cut = gl.minimum(whole, gl.cdiv(gl.maximum(row + R - 1 + below - first, 0), BN))
    for _ in range(whole - cut):
        key -= BN
        step += 1
        state = _step(q, rings, step, key, seen, scale_log2, state, False, LEFT)
    if LEFT:
        for _ in range(cut):
            key -= BN
            step += 1
            state = _step(q, rings, step, key, seen, scale_log2, state, True, LEFT)
    return state


@gluon.jit
def _first_step(q, rings, step, key, seen, scale_log2, MASKED: gl.constexpr, LEFT: gl.constexpr):
    """Compute P, m and l of the first tile that passes; the output is still 0."""
    q_buf, q_bars, k_buf, k_bars, v_buf, v_bars = rings
    R: gl.constexpr = q.shape[0]
    D: gl.constexpr = q.shape[1]
    STAGES: gl.constexpr = k_buf.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, k_buf.shape[1], 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    m_R = gl.full([R], float("-inf"), gl.float32, layout=row_layout)
    l_R = gl.full([R], 0.0, gl.float32, layout=row_layout)
    acc_RD = gl.zeros([R, D], gl.float32, acc_layout)
    k_full, k_empty = k_bars
    slot = step % STAGES
    s_RN = warpgroup_mma_wait(0, deps=(_scores(q, k_buf, k_bars, step),))
    mbarrier.arrive(k_empty.index(slot), count=1)
    p_RN, m_R, l_R, shrink_R = _softmax(s_RN, m_R, l_R, key, seen, scale_log2, MASKED, LEFT)
    return _as_operand(p_RN, acc_RD, q), m_R, l_R, acc_RD


@gluon.jit
def _step(q, rings, step, key, seen, scale_log2, state, MASKED: gl.constexpr, LEFT: gl.constexpr):
    """Compute one more tile: its scores, and the product of the last tile's P with V while its own P is computed."""
    q_buf, q_bars, k_buf, k_bars, v_buf, v_bars = rings
    STAGES: gl.constexpr = k_buf.shape[0]
    p_RN, m_R, l_R, acc_RD = state
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    last = step - 1
    s_RN = _scores(q, k_buf, k_bars, step)
    mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
    acc_RD = warpgroup_mma(p_RN, v_buf.index(last % STAGES), acc_RD, is_async=True)
    s_RN = warpgroup_mma_wait(1, deps=(s_RN,))  # the older of two: P V goes on
    mbarrier.arrive(k_empty.index(step % STAGES), count=1)  # before the softmax, which needs K no more
    p_RN, m_R, l_R, shrink_R = _softmax(s_RN, m_R, l_R, key, seen, scale_log2, MASKED, LEFT)
    if not MASKED:
        # This barrier is complete already. But ptxas would move the next wait up, before the exponentials, which do not
        # depend on it; it moves nothing past a loop, and waiting is one. (Masked steps are few and short of registers.)
        mbarrier.wait(v_full.index(last % STAGES), last // STAGES & 1)
    acc_RD = warpgroup_mma_wait(0, deps=(acc_RD,))
    mbarrier.arrive(v_empty.index(last % STAGES), count=1)
    acc_layout: gl.constexpr = acc_RD.type.layout
    acc_RD = acc_RD * gl.convert_layout(shrink_R, gl.SliceLayout(1, acc_layout))[:, None]
    return _as_operand(p_RN, acc_RD, q), m_R, l_R, acc_RD


@gluon.jit
def _scores(q, k_buf, k_bars, step):
    """Start Q Kᵀ of the ring's next tile."""
    R: gl.constexpr = q.shape[0]
    STAGES: gl.constexpr = k_buf.shape[0]
    BN: gl.constexpr = k_buf.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    full, empty = k_bars
    slot = step % STAGES
    mbarrier.wait(full.index(slot), step // STAGES & 1)
    zero_RN = gl.zeros([R, BN], gl.float32, s_layout)
    return warpgroup_mma(q, k_buf.index(slot).permute((1, 0)), zero_RN, use_acc=False, is_async=True)


@gluon.jit
def _softmax(s_RN, m_R, l_R, key, seen, scale_log2, MASKED: gl.constexpr, LEFT: gl.constexpr):
    """Return (P, m, l, 2^(m before − m)), of scores before the scale; P is not yet divided by l."""
    BN: gl.constexpr = s_RN.shape[1]
    s_layout: gl.constexpr = s_RN.type.layout
    first_R, end_R = seen
    if MASKED:
        key_N = key + gl.arange(0, BN, layout=gl.SliceLayout(0, s_layout))
        seen_RN = key_N[None, :] < end_R[:, None]
        if LEFT:
            seen_RN = seen_RN & (key_N[None, :] >= first_R[:, None])
        s_RN = gl.where(seen_RN, s_RN, float("-inf"))
    m_new_R = gl.maximum(m_R, gl.max(s_RN, 1) * scale_log2)
    top_R = gl.where(m_new_R == float("-inf"), 0.0, m_new_R)  # nothing yet: −∞ − (−∞) would be NaN
    p_RN = gl.exp2(s_RN * scale_log2 - top_R[:, None])
    shrink_R = gl.exp2(m_R - top_R)
    return p_RN, m_new_R, l_R * shrink_R + gl.sum(p_RN, 1), shrink_R


@gluon.jit
def _as_operand(p_RN, acc_RD, q):
    """Round P to V's dtype, as the left operand of a product: in the registers where it already is."""
    dtype: gl.constexpr = q.dtype
    acc_layout: gl.constexpr = acc_RD.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    return gl.convert_layout(p_RN.to(dtype), operand)


@gluon.jit
def _last_product(v_buf, v_bars, step, state):
    """Return (m, l, O) after the last tile's P V."""
    STAGES: gl.constexpr = v_buf.shape[0]
    p_RN, m_R, l_R, acc_RD = state
    full, empty = v_bars
    last = step - 1
    mbarrier.wait(full.index(last % STAGES), last // STAGES & 1)
    acc_RD = warpgroup_mma(p_RN, v_buf.index(last % STAGES), acc_RD, is_async=True)
    acc_RD = warpgroup_mma_wait(0, deps=(acc_RD,))
    mbarrier.arrive(empty.index(last % STAGES), count=1)
    return m_R, l_R, acc_RD


@gluon.jit
def _quotient(acc_RD, l_R, end_R, RIGHT: gl.constexpr):
    """Return O / l; 0 in a row that sees nothing."""
    rows: gl.constexpr = gl.SliceLayout(1, acc_RD.type.layout)
    out_RD = acc_RD / gl.convert_layout(l_R, rows)[:, None]
    if RIGHT:
        out_RD = gl.where((gl.convert_layout(end_R, rows) <= 0)[:, None], 0.0, out_RD)
    return out_RD


@gluon.jit
def _store(out_RD, buf, desc, place):
    """Store through shared memory, in the background; nothing is written outside the tensor."""
    dtype: gl.constexpr = buf.dtype
    tma.store_wait(0)  # the turn before has left the buffer
    buf.store(out_RD.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, place, buf)
