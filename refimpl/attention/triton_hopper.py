"""FlashAttention's forward for Hopper GPUs (compute capability 9.0): the same online softmax on other hardware units.

What changes against a kernel that loads through pointers:

- Tensor descriptors. In a pointer kernel every thread computes an address and a mask for each of its elements. The
  tensor memory accelerator (TMA) is given a descriptor (base, shape, strides, size of a tile) once, and then, by one
  thread, the coordinates of a tile. The tile arrives in shared memory in the order that the matrix unit reads, with
  zeros outside the shape: the tail of a sequence needs no masked load, and no tile reaches into the next head.
- Warp specialization. One warp group (128 threads) only loads and needs few registers; those that it gives up go to two
  others that only compute, 64 rows each. They synchronize at barriers in shared memory and nowhere else: while one
  computes exponentials, the products of the other keep the matrix unit busy.
- A persistent grid. One program per multiprocessor takes tile after tile: the descriptors of K and V are made once, and
  the loading warps fetch the next tile's Q and K while this one's output is still being computed and written.
- Heavy tiles first. Under a causal mask the last queries see the most keys. Tiles are dealt out from heavy to light,
  forwards and backwards in turn, so that the work is much the same for each program, and the last tiles are light.
- Three loops. Tiles of keys that every query of the tile sees, most of them, need no mask; those at the edges of the
  band, before and after them, have one. At head_dim 128 that is 484 instructions for a tile instead of 638.

Descriptors and specialized warps are left to the compiler (`tl.make_tensor_descriptor`, `warp_specialize=True`). It
specializes warps only for 4 of them, 128 rows, and one loop without a branch: there every tile of keys is masked. That
is not the default; see `SPECIALIZED`.
FlashAttention-3 (Shah et al. 2024), section 3.1, has the producer and the two consumers; the PTX ISA, "Tensors"
and "wgmma", the two units. `python -m refimpl bench kernels` shows what the compiler made of it.
"""

import contextvars
import importlib
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .call.arguments import empty_outputs
from .call.sequences import Band

MODULES = {"hopper": "triton_hopper", "gluon": "gluon_forward"}  # each has suits(q, k, v) and forward(q, k, v, …)
DTYPES = (torch.float16, torch.bfloat16)
DESCRIPTOR_BYTES = 128  # CUtensorMap in CUDA's driver API; three for each program: q, k, v
LOG2_E = math.log2(math.e)
L2_BYTES = 32 * 2**20  # for keys and values, of the H100's 50 MB L2 cache (NVIDIA H100 whitepaper, table 3)


class Tiles(NamedTuple):
    """Tile sizes for a head_dim: rows of Q, rows of K and V, warps, stages (tiles of K and V in flight)."""

    queries: int
    keys: int
    warps: int
    stages: int
    specialize: bool = False
    split: bool = False  # tiles that every row sees get a separate loop, without a mask


# Keys are padded head_dims. At 256 the accumulator leaves no registers for specialized warps or for a second loop (with
# `split`, Triton 3.6 spills 80 bytes), and Q alone fills 64 KiB.
TILES = {64: Tiles(128, 128, 8, 3, split=True), 128: Tiles(128, 128, 8, 2, split=True), 256: Tiles(128, 64, 8, 2)}
# Two consumers of 64 rows each, used only if `specialize` is given. With three stages or more, what Triton 3.6 makes of
# it returned NaN from the third tile of keys on (an H200, head_dim 64); with two and with one all calls were right.
SPECIALIZED = {64: Tiles(128, 128, 4, 2, specialize=True), 128: Tiles(128, 128, 4, 2, specialize=True)}


def suits(q_BHTD, k_BGSD, v_BGSD):
    """Say whether `forward` takes these: CUDA of capability 9.0, fp16 or bf16, head_dim up to 256, and what TMA needs:
    the elements of a row contiguous, the base and all strides multiples of 16 bytes."""
    tensors = (q_BHTD, k_BGSD, v_BGSD)
    return (all(x.device.type == "cuda" and x.dtype in DTYPES for x in tensors)
            and torch.cuda.get_device_capability(q_BHTD.device) == (9, 0) and q_BHTD.shape[-1] <= max(TILES)
            and all(map(aligned, tensors)))


def module_of(kernel):
    """Import a kernel of MODULES, late: some versions of Triton lack Gluon. RuntimeError for such a one."""
    try:
        return importlib.import_module(f".{MODULES[kernel]}", __package__)
    except Exception as error:  # an import, an attribute, or a decorator's argument
        raise RuntimeError(f"kernel={kernel!r} with Triton {triton.__version__}, which lacks what it is written in "
                           f"({type(error).__name__}: {error}): kernel='auto' needs none of it") from error


def check_suits(kernel, q_BHTD, k_BGSD, v_BGSD, problem):
    """Raise ValueError unless a kernel of MODULES can compute this call of a `Problem`."""
    plain = all(x is None for x in (problem.packed, problem.dropout, problem.score.any, problem.sinks))
    if not plain or q_BHTD.shape[-1] != v_BGSD.shape[-1] or not module_of(kernel).suits(q_BHTD, k_BGSD, v_BGSD):
        raise ValueError(f"kernel={kernel!r} with q of shape {tuple(q_BHTD.shape)}, strides {q_BHTD.stride()}, "
                         f"{q_BHTD.dtype} on {q_BHTD.device}, {'with' if problem.dropout else 'no'} dropout, "
                         f"{'packed' if problem.packed else 'not packed'}: expected float16 or bfloat16 on a GPU of "
                         "compute capability 9.0, base and strides of multiples of 16 bytes, no dropout, not packed, "
                         "no score hooks or sinks, v of the same head_dim, and what "
                         f"refimpl.attention.{MODULES[kernel]}.suits says; kernel='auto' takes every call")


def aligned(x_BHTD):
    """Say whether TMA can load from this tensor. Strides of dimensions of size 1 are never used."""
    rows = zip(x_BHTD.shape[:3], x_BHTD.stride()[:3], strict=True)
    return (x_BHTD.stride(3) == 1 and x_BHTD.data_ptr() % 16 == 0
            and all(n == 1 or (stride > 0 and stride * x_BHTD.element_size() % 16 == 0) for n, stride in rows))


def forward(q_BHTD, k_BGSD, v_BGSD, *, scale, causal, window, specialize=False):
    """Compute (out_BHTD, lse2_BHT) of tensors that suit, laid out by `empty_outputs`.

    lse2 = log2 Σ 2^(scale · log2(e) · q kᵀ) over the keys seen, in fp32, −∞ for a row that sees none (its output is 0).
    `specialize`: some warps load and others compute, where head_dim is at most 128.
    """
    out_BHTD, lse2_BHT = empty_outputs(q_BHTD)
    values, constants, tiles = launch_arguments(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse2_BHT, scale, causal, window,
                                                specialize)

    def launch():
        triton.set_allocator(lambda size, alignment, stream: q_BHTD.new_empty(size, dtype=torch.int8))  # descriptors
        forward_kernel[grid(lse2_BHT, tiles.queries)](**values, **constants, num_warps=tiles.warps,
                                                      num_stages=tiles.stages)

    with torch.cuda.device_of(q_BHTD):
        contextvars.copy_context().run(launch)  # keeps the caller's own allocator
    return out_BHTD, lse2_BHT


def grid(lse2_BHT, rows):
    """Return the grid: one program for each multiprocessor, a few in the interpreter; no more than tiles of `rows`."""
    (B, H, T), device = lse2_BHT.shape, lse2_BHT.device
    programs = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
    return (min(programs, B * H * triton.cdiv(T, rows)),)


def arguments(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse2_BHT, scale, causal, window):
    """Return (the arguments of a launch without those of its mask, the Band, the head_dim that is padded to)."""
    (B, H, T, D), (G, S) = q_BHTD.shape, k_BGSD.shape[1:3]
    # heads whose keys and values fit into the L2 cache
    cached = max(1, L2_BYTES // (2 * S * D * q_BHTD.element_size())) * (H // G)
    values = {"q_ptr": q_BHTD, "k_ptr": k_BGSD, "v_ptr": v_BGSD, "out_ptr": out_BHTD, "lse2_ptr": lse2_BHT, "B": B,
              "H": H, "G": G, "T": T, "S": S, "scale_log2": scale * LOG2_E, "section": min(cached, B * H)}
    for name, x in (("q", q_BHTD), ("k", k_BGSD), ("v", v_BGSD)):
        # of size 1 a stride is never used, and TMA refuses odd ones
        strides = (16 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True))
        values |= zip((f"{name}_batch", f"{name}_head", f"{name}_row"), strides, strict=False)
    return values, Band.of(T, S, causal, window), max(64, triton.next_power_of_2(D))


def launch_arguments(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse2_BHT, scale, causal, window, specialize):
    """Return (arguments, constants, Tiles) of a launch."""
    values, band, padded = arguments(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse2_BHT, scale, causal, window)
    tiles = {**TILES, **(SPECIALIZED if specialize else {})}[padded]
    values |= {"left": band.left or 0, "right": band.right or 0}
    constants = {"D": q_BHTD.shape[-1], "PADDED": padded, "BM": tiles.queries, "BN": tiles.keys,
                 "LEFT": band.left is not None, "RIGHT": band.right is not None, "TAIL": band.S % tiles.keys != 0,
                 "SPECIALIZE": tiles.specialize, "SPLIT": tiles.split}
    return values, constants, tiles


# --- kernel ----------------------------------------------------------------------------------------------------------

NOT_SPECIALIZED = ["B", "H", "G", "T", "S", "left", "right", "section",
                    *(f"{x}_{stride}" for x in "qkv" for stride in ("batch", "head", "row"))]


@triton.jit
def turns(tiles):
    """Count the tiles of this program."""
    rounds, program = tiles // tl.num_programs(0), tl.program_id(0)
    return rounds + (_seat(rounds, program) < tiles % tl.num_programs(0)).to(tl.int32)


@triton.jit
def _seat(turn, program):
    """Deal tiles out forwards, then backwards, so that no program gets the heaviest of each round."""
    return tl.where(turn % 2 == 0, program, tl.num_programs(0) - 1 - program)


@triton.jit
def place(turn, heads, tiles, section):
    """Return (head, tile of queries) of this program's turn. Heads are in sections whose keys fit into the L2 cache;
    within one, all heads' last tiles of queries come first."""
    number = turn * tl.num_programs(0) + _seat(turn, tl.program_id(0))
    begin = number // (tiles * section) * section
    here = tl.minimum(section, heads - begin)
    number -= begin * tiles
    return begin + number % here, tiles - 1 - number // here


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse2_ptr, B, H, G, T, S, scale_log2, left, right, section,
                   q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
                   D: tl.constexpr, PADDED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr,
                   RIGHT: tl.constexpr, TAIL: tl.constexpr, SPECIALIZE: tl.constexpr, SPLIT: tl.constexpr):
    """Compute the tiles of this program, one after the other."""
    k_desc = tl.make_tensor_descriptor(k_ptr, [B, G, S, D], [k_batch, k_head, k_row, 1], [1, 1, BN, PADDED])
    v_desc = tl.make_tensor_descriptor(v_ptr, [B, G, S, D], [v_batch, v_head, v_row, 1], [1, 1, BN, PADDED])
    tiles = tl.cdiv(T, BM)
    for turn in tl.range(0, turns(B * H * tiles)):
        head, tile = place(turn, B * H, tiles, section)
        b, g = head // H, head % H // (H // G)
        # A head of queries has its own descriptor: in two dimensions the compiler can cut the tile between consumers.
        q_base = q_ptr + b.to(tl.int64) * q_batch + (head % H).to(tl.int64) * q_head
        q_desc = tl.make_tensor_descriptor(q_base, [T, D], [q_row, 1], [BM, PADDED])
        q_MD = q_desc.load([tile * BM, 0])
        # Rows are counted as key positions throughout. Triton 3.6 and 3.7 add the second consumer's 64 rows to the
        # coordinate of q's load, and to whatever else uses that very value; `start` is another one.
        start = tile * BM + (S - T)
        row_M = start + tl.arange(0, BM)
        end_M = tl.minimum(row_M + right + 1, S) if RIGHT else tl.full([BM], S, tl.int32)
        m_M, l_M, acc_MD = all_keys(q_MD, k_desc, v_desc, b, g, start, row_M - left, end_M, S, left, right, scale_log2,
                                     BN, LEFT, RIGHT, TAIL, SPECIALIZE, SPLIT)
        acc_MD /= l_M[:, None]
        if RIGHT:
            acc_MD = tl.where((end_M <= 0)[:, None], 0.0, acc_MD)  # a row that sees nothing: 0 / 0
        row_M = row_M.to(tl.int64) - (S - T)
        write(out_ptr, acc_MD, (b.to(tl.int64) * T + row_M) * H + head % H, lse2_ptr, m_M + tl.log2(l_M),
               head.to(tl.int64) * T + row_M, row_M < T, D)


@triton.jit
def all_keys(q_MD, k_desc, v_desc, b, g, start, first_M, end_M, S, left, right, scale_log2, BN: tl.constexpr,
              LEFT: tl.constexpr, RIGHT: tl.constexpr, TAIL: tl.constexpr, SPECIALIZE: tl.constexpr,
              SPLIT: tl.constexpr):
    """Return (m, l, acc) after all tiles of keys that the rows see; the first row is at key position `start`."""
    BM: tl.constexpr = q_MD.shape[0]
    m_M, l_M = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    acc_MD = tl.zeros([BM, q_MD.shape[1]], tl.float32)
    first = tl.maximum(start - left, 0) // BN * BN if LEFT else 0
    end = tl.minimum(start + BM + right, S) if RIGHT else S
    if SPLIT:  # keys from `inner` to `edge` are seen by every row
        inner = tl.cdiv(tl.maximum(start + BM - 1 - left, 0), BN) * BN if LEFT else 0
        edge = tl.maximum(inner, (tl.minimum(tl.maximum(start + right + 1, 0), S) if RIGHT else S) // BN * BN)
        if LEFT:
            m_M, l_M, acc_MD = loop_over_keys(m_M, l_M, acc_MD, q_MD, k_desc, v_desc, b, g, first,
                                              tl.minimum(inner, end), first_M, end_M, scale_log2, BN, True, True, False)
        m_M, l_M, acc_MD = loop_over_keys(m_M, l_M, acc_MD, q_MD, k_desc, v_desc, b, g, inner, edge, first_M, end_M,
                                          scale_log2, BN, False, False, False)
        if RIGHT or TAIL:
            m_M, l_M, acc_MD = loop_over_keys(m_M, l_M, acc_MD, q_MD, k_desc, v_desc, b, g, edge, end, first_M, end_M,
                                              scale_log2, BN, LEFT, True, False)
    else:
        m_M, l_M, acc_MD = loop_over_keys(m_M, l_M, acc_MD, q_MD, k_desc, v_desc, b, g, first, end, first_M, end_M,
                                          scale_log2, BN, LEFT, LEFT or RIGHT or TAIL, SPECIALIZE)
    return m_M, l_M, acc_MD


@triton.jit
def loop_over_keys(m_M, l_M, acc_MD, q_MD, k_desc, v_desc, b, g, first, end, first_M, end_M, scale_log2,
                   BN: tl.constexpr, LEFT: tl.constexpr, MASKED: tl.constexpr, SPECIALIZE: tl.constexpr):
    """Return (m, l, acc) after the tiles of keys from `first` to `end`. `MASKED`: a row may not see all of them."""
    for key in tl.range(first, end, BN, warp_specialize=SPECIALIZE):
        k_ND = k_desc.load([b, g, key, 0]).reshape(BN, q_MD.shape[1])
        s_MN = tl.dot(q_MD, k_ND.T)
        if MASKED:
            s_MN = _masked(s_MN, key, first_M, end_M, LEFT)
        m_new_M = tl.maximum(m_M, tl.max(s_MN, 1) * scale_log2)
        top_M = tl.where(m_new_M == float("-inf"), 0.0, m_new_M)  # nothing yet: −∞ − (−∞) would be NaN
        p_MN = tl.exp2(s_MN * scale_log2 - top_M[:, None])
        shrink_M = tl.exp2(m_M - top_M)
        l_M = l_M * shrink_M + tl.sum(p_MN, 1)
        acc_MD *= shrink_M[:, None]
        v_ND = v_desc.load([b, g, key, 0]).reshape(BN, q_MD.shape[1])
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD)
        m_M = m_new_M
    return m_M, l_M, acc_MD


@triton.jit
def _masked(s_MN, key, first_M, end_M, LEFT: tl.constexpr):
    """Write −∞ where a row does not see a key."""
    key_N = key + tl.arange(0, s_MN.shape[1])
    seen_MN = key_N[None, :] < end_M[:, None]
    if LEFT:
        seen_MN &= key_N[None, :] >= first_M[:, None]
    return tl.where(seen_MN, s_MN, float("-inf"))


@triton.jit
def write(out_ptr, out_MD, out_M, lse2_ptr, lse2_M, lse2_at_M, inside_M, D: tl.constexpr):
    """Store the rows inside, through pointers: the coordinate of a store by TMA would have the fault of q's load."""
    d_D = tl.arange(0, out_MD.shape[1])
    tl.store(out_ptr + out_M[:, None] * D + d_D[None, :], out_MD.to(out_ptr.dtype.element_ty),
             mask=inside_M[:, None] & (d_D < D)[None, :])
    tl.store(lse2_ptr + lse2_at_M, lse2_M, mask=inside_M)
