"""The gated delta rule in Triton: three kernels, of which each is a part of `chunks`.

    inverse     one program a chunk: (I + A)⁻¹, C × C, row by row; all chunks beside each other
    forward     one program a head and tile of V's columns: S stays on the chip, from the first chunk to the last
    backward    one program a head: from the last chunk to the first, over the tiles of V's columns

Columns of S do not know one another: that is why forward may be cut by them. In the backward each state is read once,
and dS is written over it, since nobody reads it again: dS takes no memory of its own.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..kernels.configs import Config, chip_of
from ..kernels.tile import Heads, Launch, load, padded, start, store

# dtype of q → (that of the factors of a product, their precision). A state may exceed what fp16 can hold.
PRODUCTS = {torch.bfloat16: (tl.bfloat16, "tf32"), torch.float16: (tl.float32, "tf32"),
            torch.float32: (tl.float32, "tf32x3")}


@triton.jit
def product(a, b, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Return a b in fp32, of factors that are rounded to KIND."""
    return tl.dot(a.to(KIND), b.to(KIND), input_precision=PRECISION)


@triton.jit
def column(x, batch, head, first, end, C: tl.constexpr):
    """Load C numbers of (B, H, T) as fp32; zeros from `end` on."""
    rows = first + tl.arange(0, C)
    return tl.load(start(x, batch, head, 0) + rows * x.row, mask=rows < end, other=0.0).to(tl.float32)


@triton.jit
def fading(logs_C, C: tl.constexpr):
    """Return Γ, (C, C)."""
    later = tl.arange(0, C)[:, None] < tl.arange(0, C)[None, :]
    return tl.where(later, 0.0, tl.exp(tl.where(later, 0.0, logs_C[:, None] - logs_C[None, :])))


@triton.jit
def last_of(x_C, C: tl.constexpr):
    """Return the last number of a vector."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x_C, 0.0), 0)


@triton.jit
def load_state(ptr, column, D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Load the tile of a state, (D, V) and contiguous, that begins at a column."""
    row, column = tl.arange(0, BLOCK_D)[:, None], column + tl.arange(0, BLOCK_V)[None, :]
    return tl.load(ptr + row * V + column, mask=(row < D) & (column < V), other=0.0)


@triton.jit
def store_state(ptr, s_DV, column, D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """Store the tile of a state that begins at a column."""
    row, column = tl.arange(0, BLOCK_D)[:, None], column + tl.arange(0, BLOCK_V)[None, :]
    tl.store(ptr + row * V + column, s_DV, mask=(row < D) & (column < V))


@triton.jit
def load_columns(x, batch, head, first, end, column, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr):
    """Load C rows of x from row `first`, and BLOCK_V columns from `column`, as fp32."""
    row, column = first + tl.arange(0, C)[:, None], column + tl.arange(0, BLOCK_V)[None, :]
    at = start(x, batch, head, first) + (row - first) * x.row + column * x.column
    return tl.load(at, mask=(row < end) & (column < V), other=0.0).to(tl.float32)


@triton.jit
def store_columns(x, batch, head, first, end, column, tile, V: tl.constexpr, C: tl.constexpr, BLOCK_V: tl.constexpr):
    """Store what `load_columns` loads."""
    row, column = first + tl.arange(0, C)[:, None], column + tl.arange(0, BLOCK_V)[None, :]
    at = start(x, batch, head, first) + (row - first) * x.row + column * x.column
    tl.store(at, tile.to(x.ptr.dtype.element_ty), mask=(row < end) & (column < V))


@triton.jit
def inverse_kernel(k, log_decay, beta, inverse, T, heads, group, D: tl.constexpr, BLOCK_D: tl.constexpr,
                   C: tl.constexpr):
    """Compute (I + A)⁻¹ of one chunk: row i is e_i − Σ_j A_ij (row j), j < i."""
    chunks = tl.cdiv(T, C)
    first, head = tl.program_id(0) % chunks * C, tl.program_id(0) // chunks % heads
    batch = tl.program_id(0) // chunks // heads
    k_CD = load(k, start(k, batch, head // group, 0), first, T, D, C, BLOCK_D)
    logs_C = tl.cumsum(column(log_decay, batch, head, first, T, C), 0)
    beta_C = column(beta, batch, head, first, T, C)
    row, col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    a_CC = tl.dot(k_CD, k_CD.T, input_precision="tf32x3") * fading(logs_C, C) * beta_C[:, None]
    transposed_CC = tl.where(row < col, a_CC.T, 0.0)  # so that A_i· stands beside the rows that it weighs
    m_CC = tl.where(row == col, 1.0, 0.0)
    for i in range(1, C):
        weights_C = tl.sum(tl.where(col == i, transposed_CC, 0.0), 1)
        new_C = tl.where(tl.arange(0, C) == i, 1.0, 0.0) - tl.sum(weights_C[:, None] * m_CC, 0)
        m_CC = tl.where(row == i, new_C[None, :], m_CC)
    store(inverse, start(inverse, batch, head, 0), first, T, m_CC, C, C, C)


@triton.jit
def forward_kernel(q, k, v, log_decay, beta, inverse, state, out, last, states, T, heads, group, scale,
                   D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, C: tl.constexpr,
                   DELTA: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Pass all chunks of a head by a tile of its state. `out`, `last`, `states`: None where nobody wants them."""
    tiles: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    at, head = tl.program_id(0) % tiles * BLOCK_V, tl.program_id(0) // tiles % heads
    batch = tl.program_id(0) // tiles // heads
    s_DV = tl.zeros([BLOCK_D, BLOCK_V], tl.float32)
    if state is not None:
        s_DV = load_state(start(state, batch, head, 0), at, D, BLOCK_D, V, BLOCK_V)
    for n in range(tl.cdiv(T, C)):
        first = n * C
        if states is not None:
            store_state(start(states, batch, head, n), s_DV, at, D, BLOCK_D, V, BLOCK_V)
        k_CD = load(k, start(k, batch, head // group, 0), first, T, D, C, BLOCK_D).to(KIND)
        u_CV = load_columns(v, batch, head, first, T, at, V, C, BLOCK_V)
        logs_C = tl.cumsum(column(log_decay, batch, head, first, T, C), 0)
        end, gamma_C1 = last_of(logs_C, C), tl.exp(logs_C)[:, None]
        if DELTA:
            u_CV -= gamma_C1 * product(k_CD, s_DV, KIND, PRECISION)
        u_CV = u_CV * column(beta, batch, head, first, T, C)[:, None]
        if DELTA:
            m_CC = load(inverse, start(inverse, batch, head, 0), first, T, C, C, C)
            u_CV = product(m_CC, u_CV, KIND, PRECISION)
        if out is not None:
            q_CD = load(q, start(q, batch, head // group, 0), first, T, D, C, BLOCK_D).to(KIND)
            o_CV = product(q_CD, s_DV, KIND, PRECISION) * gamma_C1
            o_CV += product(product(q_CD, k_CD.T, KIND, PRECISION) * fading(logs_C, C), u_CV, KIND, PRECISION)
            store_columns(out, batch, head, first, T, at, o_CV * scale, V, C, BLOCK_V)
        s_DV = tl.exp(end) * s_DV + product(k_CD.T, tl.exp(end - logs_C)[:, None] * u_CV, KIND, PRECISION)
    if last is not None:
        store_state(start(last, batch, head, 0), s_DV, at, D, BLOCK_D, V, BLOCK_V)


@triton.jit
def backward_kernel(q, k, v, log_decay, beta, inverse, d_out, states, dq, dk, dv, d_log_decay, d_beta, T, heads, group,
                    scale, D: tl.constexpr, BLOCK_D: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr,
                    C: tl.constexpr, DELTA: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr):
    """Pass the chunks of a head, the last one first. `states` are S before each chunk, and dS after the last: from then
    on dS before each chunk. Three loops over V's columns, so that few matrices are in registers at a time."""
    head, batch, chunks = tl.program_id(0) % heads, tl.program_id(0) // heads, tl.cdiv(T, C)
    row, col = tl.arange(0, C)[:, None], tl.arange(0, C)[None, :]
    for i in range(chunks):
        n = chunks - 1 - i
        first = n * C
        q_CD = load(q, start(q, batch, head // group, 0), first, T, D, C, BLOCK_D).to(KIND)
        k_CD = load(k, start(k, batch, head // group, 0), first, T, D, C, BLOCK_D).to(KIND)
        logs_C = tl.cumsum(column(log_decay, batch, head, first, T, C), 0)
        beta_C, fading_CC = column(beta, batch, head, first, T, C), fading(logs_C, C)
        end, gamma_C1 = last_of(logs_C, C), tl.exp(logs_C)[:, None]
        rest_C1 = tl.exp(end - logs_C)[:, None]
        p_CC = product(q_CD, k_CD.T, KIND, PRECISION) * fading_CC
        if DELTA:
            m_CC = load(inverse, start(inverse, batch, head, 0), first, T, C, C, C).to(KIND)
        before, after = start(states, batch, head, n), start(states, batch, head, n + 1)
        dp_CC, da_CC = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
        d_beta_C, d_logs_C, d_end = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32), 0.0
        for at in range(0, V, BLOCK_V):  # dV; and what is (C, C)
            s_DV = load_state(before, at, D, BLOCK_D, V, BLOCK_V)
            ds_DV = load_state(after, at, D, BLOCK_D, V, BLOCK_V)
            missing_CV = load_columns(v, batch, head, first, T, at, V, C, BLOCK_V)
            do_CV = load_columns(d_out, batch, head, first, T, at, V, C, BLOCK_V) * scale
            if DELTA:
                known_CV = gamma_C1 * product(k_CD, s_DV, KIND, PRECISION)
                missing_CV -= known_CV
            u_CV = missing_CV * beta_C[:, None]
            end_CV = rest_C1 * product(k_CD, ds_DV, KIND, PRECISION)
            dr_CV = product(p_CC.T, do_CV, KIND, PRECISION) + end_CV  # dU
            if DELTA:
                u_CV = product(m_CC, u_CV, KIND, PRECISION)
                dr_CV = product(m_CC.T, dr_CV, KIND, PRECISION)  # and now dR
                da_CC -= product(dr_CV, u_CV.T, KIND, PRECISION)
            dp_CC += product(do_CV, u_CV.T, KIND, PRECISION)
            d_beta_C += tl.sum(dr_CV * missing_CV, 1)
            at_end_C = tl.sum(u_CV * end_CV, 1)
            d_logs_C -= at_end_C
            d_end += tl.sum(at_end_C) + tl.exp(end) * tl.sum(s_DV * ds_DV)
            dv_CV = dr_CV * beta_C[:, None]
            if DELTA:
                d_logs_C -= tl.sum(dv_CV * known_CV, 1)
            store_columns(dv, batch, head, first, T, at, dv_CV, V, C, BLOCK_V)
        dq_CD = tl.zeros([C, BLOCK_D], tl.float32)
        for at in range(0, V, BLOCK_V):
            do_CV = load_columns(d_out, batch, head, first, T, at, V, C, BLOCK_V) * (scale * gamma_C1)
            dq_CD += product(do_CV, load_state(before, at, D, BLOCK_D, V, BLOCK_V).T, KIND, PRECISION)
        # each Γ_ij is γ_i / γ_j: sums by rows less sums by columns
        d_logs_C += tl.sum(q_CD * dq_CD, 1) + tl.sum(dp_CC * p_CC, 1) - tl.sum(dp_CC * p_CC, 0)
        dp_CC = dp_CC * fading_CC
        dq_CD += product(dp_CC, k_CD, KIND, PRECISION)
        store(dq, start(dq, batch, head, 0), first, T, dq_CD, D, C, BLOCK_D)
        dk_CD = product(dp_CC.T, q_CD, KIND, PRECISION)
        if DELTA:
            faded_CC = product(k_CD, k_CD.T, KIND, PRECISION) * fading_CC
            da_CC = tl.where(row > col, da_CC, 0.0)
            d_beta_C += tl.sum(da_CC * faded_CC, 1)
            da_CC = da_CC * beta_C[:, None]
            d_logs_C += tl.sum(da_CC * faded_CC, 1) - tl.sum(da_CC * faded_CC, 0)
            da_CC = da_CC * fading_CC
            dk_CD += product(da_CC + da_CC.T, k_CD, KIND, PRECISION)
        for at in range(0, V, BLOCK_V):  # dK; and dS over S: U and dV again, since what was stored is rounded
            s_DV = load_state(before, at, D, BLOCK_D, V, BLOCK_V)
            ds_DV = load_state(after, at, D, BLOCK_D, V, BLOCK_V)
            u_CV = load_columns(v, batch, head, first, T, at, V, C, BLOCK_V)
            do_CV = load_columns(d_out, batch, head, first, T, at, V, C, BLOCK_V) * scale
            if DELTA:
                u_CV -= gamma_C1 * product(k_CD, s_DV, KIND, PRECISION)
            u_CV = u_CV * beta_C[:, None]
            if DELTA:
                u_CV = product(m_CC, u_CV, KIND, PRECISION)
                dv_CV = product(p_CC.T, do_CV, KIND, PRECISION) + rest_C1 * product(k_CD, ds_DV, KIND, PRECISION)
                dv_CV = product(m_CC.T, dv_CV, KIND, PRECISION) * (beta_C[:, None] * gamma_C1)
            dk_CD += product(rest_C1 * u_CV, ds_DV.T, KIND, PRECISION)
            ds_DV = tl.exp(end) * ds_DV + product(q_CD.T, gamma_C1 * do_CV, KIND, PRECISION)
            if DELTA:
                dk_CD -= product(dv_CV, s_DV.T, KIND, PRECISION)
                ds_DV -= product(k_CD.T, dv_CV, KIND, PRECISION)
            store_state(before, ds_DV, at, D, BLOCK_D, V, BLOCK_V)
        tl.debug_barrier()  # and dS in the next chunk
        store(dk, start(dk, batch, head, 0), first, T, dk_CD, D, C, BLOCK_D)
        d_logs_C += tl.where(tl.arange(0, C) == C - 1, d_end, 0.0)
        rows = first + tl.arange(0, C)
        d_log_decay_C = tl.sum(tl.where(row >= col, d_logs_C[:, None], 0.0), 0)  # of all γ that it is a part of
        tl.store(start(d_log_decay, batch, head, 0) + rows, d_log_decay_C, mask=rows < T)
        tl.store(start(d_beta, batch, head, 0) + rows, d_beta_C, mask=rows < T)


# --- launches --------------------------------------------------------------------------------------------------------

# (kernel, chip) → a Config: block_n columns of V at a time. The chunk is the caller's. In bf16, of chunks of
# 64, the backward spills 0.7 KB a thread at 64 columns and 1.9 at 128 on an H100, 2.9 and 5.4 on an A100.
CONFIGS = {"inverse": Config(0, 0, 4, 1), "forward": Config(0, 32, 4, 1),
           ("backward", "datacenter"): Config(0, 32, 8, 1), ("backward", "any"): Config(0, 16, 4, 1)}


def config_of(kernel, chip):
    """Return the Config of "inverse", "forward" or "backward" for a chip of `configs.TABLE`."""
    return CONFIGS.get(kernel) or CONFIGS[kernel, chip]


def _config(kernel, device):
    return config_of(kernel, "any" if device.type == "cpu" else chip_of(device))


class Problem(NamedTuple):
    """What is computed, besides the tensors."""

    scale: float
    delta: bool
    chunk: int

    def launch(self, kernel, programs, config, k_BGTD, v_BHTV, **tensors):
        """Return a Launch: `programs` for each head of the batch."""
        (B, G, T, D), (H, V) = k_BGTD.shape, (v_BHTV.shape[1], v_BHTV.shape[3])
        kind, precision = PRODUCTS[v_BHTV.dtype]
        named = {name: x if x is None else _strides_of(x) for name, x in tensors.items()}
        return Launch(kernel, programs * B * H, {
            "k": Heads.of(k_BGTD), "v": Heads.of(v_BHTV), **named, "T": T, "heads": H, "group": H // G,
            "scale": self.scale, "D": D, "BLOCK_D": padded(D), "V": V, "BLOCK_V": min(config.block_n, padded(V)),
            "C": self.chunk, "DELTA": self.delta, "KIND": kind,
            "PRECISION": precision}, config)


def _strides_of(x):
    return Heads.of(x) if x.ndim < 5 else Heads(x, *x.stride()[:3], 1)  # of states: `start` finds the n-th of a head


def inverse_launch(k_BGTD, log_decay_BHT, beta_BHT, inverse_BHTC, config=CONFIGS["inverse"]):
    """Return the Launch of `inverse_kernel`."""
    (B, G, T, D), (H, C) = k_BGTD.shape, inverse_BHTC.shape[1::2]
    named = {"k": k_BGTD, "log_decay": log_decay_BHT, "beta": beta_BHT, "inverse": inverse_BHTC}
    return Launch(inverse_kernel, triton.cdiv(T, C) * H * B, {
        **{name: Heads.of(x) for name, x in named.items()}, "T": T, "heads": H, "group": H // G, "D": D,
        "BLOCK_D": padded(D), "C": C}, config)


def forward_launch(problem, q_BGTD, k_BGTD, v_BHTV, config=CONFIGS["forward"], **tensors):
    """Return the Launch of `forward_kernel`. `tensors`: log_decay, beta; inverse, state, out, last, states or None."""
    tiles = triton.cdiv(v_BHTV.shape[3], min(config.block_n, padded(v_BHTV.shape[3])))
    return problem.launch(forward_kernel, tiles, config, k_BGTD, v_BHTV, q=q_BGTD, **tensors)


def backward_launch(problem, q_BGTD, k_BGTD, v_BHTV, config=None, **tensors):
    """Return the Launch of `backward_kernel`. `tensors`: log_decay, beta, inverse, d_out, states, and the gradients."""
    config = config or _config("backward", q_BGTD.device)
    return problem.launch(backward_kernel, 1, config, k_BGTD, v_BHTV, q=q_BGTD, **tensors)
