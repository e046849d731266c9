"""The forward for Hopper once more, in Gluon: what Triton's compiler decided in `triton_hopper.py` is written out here.

Gluon is Triton's own language one level down. A tile in registers has a layout (which thread holds which element), a
tile in shared memory is an allocation of ours, and nothing is asynchronous unless it is written so:

- mbarriers in shared memory: a counter of arrivals, or of bytes that TMA brings, with a phase bit that flips each time
  it is complete. Each buffer has two: `full` (the bytes have arrived) and `empty` (both consumers have read them). The
  n-th use of a ring of buffers waits for phase n // STAGES & 1.
- Three partitions of one program: a warp that issues TMA loads and holds 24 registers a thread, and two warp groups of
  64 rows each, which take the registers that it gave up (240).
- Matrix products that run in the background, until one waits for them. A step (`gluon_consumer.py`) issues the next
  tile's Q Kᵀ, then this tile's P V, waits for the first one alone, and does its exponentials while the second one runs:
  FlashAttention-3 (Shah et al. 2024), section 3.2 and algorithm 2. Tiles of keys pass from the last to the first, so
  that those on a causal mask's diagonal come at once and all that follow need no mask.

`kernel="gluon"` asks for it by name: a barrier in the wrong place does not raise, it hangs the GPU. On an H200 with
Triton 3.6 (head_dim 128, 16,384 tokens, not causal) it reached 696 TFLOP/s, the pointer kernel 424, `triton_hopper.py`
with specialized warps 619. Of three kernels by Meta on an H100 plain Triton reached 487, one with producer and
consumers 502, one that overlaps as above 612 (facebookexperimental/triton, pull request 206, 2025). The signature is
that of `triton_hopper.forward`.
"""

import contextvars

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from . import triton_hopper as hopper
from .call.arguments import empty_outputs
from .gluon_consumer import attend, keys_seen
from .triton_hopper import place, turns

QUERIES, KEYS = 128, 128  # rows of a tile: of Q, 64 for each consumer; of K and V
STAGES = {64: 3, 128: 2}  # tiles of K and of V in shared memory, by the head_dim that is padded to
# Registers of a thread: two consumers, and the warp that loads; they share 3 · 168. 168 is what 65,536 registers give
# 384 threads, in steps of 8.
REGISTERS = {"consumer": 240, "producer": 24, "all": 168}


def suits(q_BHTD, k_BGSD, v_BGSD):
    """Say the same as `triton_hopper.suits`, for a head_dim up to 128 that is a multiple of 8: TMA stores the output,
    too."""
    D = q_BHTD.shape[-1]
    return D <= max(STAGES) and D % 8 == 0 and hopper.suits(q_BHTD, k_BGSD, v_BGSD)


def forward(q_BHTD, k_BGSD, v_BGSD, *, scale, causal, window):
    """Compute (out_BHTD, lse2_BHT) as `triton_hopper.forward` does, of tensors that suit."""
    out_BHTD, lse2_BHT = empty_outputs(q_BHTD)
    arguments, constants = launch_arguments(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse2_BHT, scale, causal, window)
    grid = hopper.grid(lse2_BHT, QUERIES)

    def launch():
        triton.set_allocator(lambda size, alignment, stream: q_BHTD.new_empty(size, dtype=torch.int8))  # descriptors
        forward_kernel[grid](**arguments, **constants, num_warps=4, maxnreg=REGISTERS["all"])

    with torch.cuda.device_of(q_BHTD):
        contextvars.copy_context().run(launch)
    return out_BHTD, lse2_BHT


def launch_arguments(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse2_BHT, scale, causal, window):
    """Return (arguments, constants) of a launch. Query i sees keys i + below … i + above."""
    arguments, band, padded = hopper.arguments(q_BHTD, k_BGSD, v_BGSD, out_BHTD, lse2_BHT, scale, causal, window)
    shift = band.S - band.T
    arguments |= {"below": shift - (band.left or 0), "above": shift + (band.right or 0)}
    return arguments, {"D": q_BHTD.shape[-1], "PADDED": padded, "BM": QUERIES, "BN": KEYS, "STAGES": STAGES[padded],
                       "LEFT": band.left is not None, "RIGHT": band.right is not None, "TAIL": band.S % KEYS != 0,
                       "CONSUMER": REGISTERS["consumer"], "PRODUCER": REGISTERS["producer"]}


# --- kernel ----------------------------------------------------------------------------------------------------------

NOT_SPECIALIZED = [*(x for x in hopper.NOT_SPECIALIZED if x not in ("left", "right")), "below", "above"]


@gluon.jit(do_not_specialize=NOT_SPECIALIZED)
def forward_kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse2_ptr, B, H, G, T, S, scale_log2, below, above, section,
                   q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
                   D: gl.constexpr, PADDED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr,
                   LEFT: gl.constexpr, RIGHT: gl.constexpr, TAIL: gl.constexpr, CONSUMER: gl.constexpr,
                   PRODUCER: gl.constexpr):
    """Start the three partitions, with their buffers and barriers."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    R: gl.constexpr = BM // 2
    described: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)  # 128 bytes of each row, then the next 128
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    out_row = H.to(gl.int64) * D
    q_desc = tma.make_tensor_descriptor(q_ptr, [B, H, T, D], [q_batch, q_head, q_row, 1], [1, 1, R, PADDED], described)
    k_desc = tma.make_tensor_descriptor(k_ptr, [B, G, S, D], [k_batch, k_head, k_row, 1], [1, 1, BN, PADDED], described)
    v_desc = tma.make_tensor_descriptor(v_ptr, [B, G, S, D], [v_batch, v_head, v_row, 1], [1, 1, BN, PADDED], described)
    out_desc = tma.make_tensor_descriptor(out_ptr, [B, H, T, D], [T * out_row, D, out_row, 1], [1, 1, R, PADDED],
                                          described)
    q_buf = gl.allocate_shared_memory(dtype, [2, R, PADDED], swizzled)
    k_buf = gl.allocate_shared_memory(dtype, [STAGES, BN, PADDED], swizzled)
    v_buf = gl.allocate_shared_memory(dtype, [STAGES, BN, PADDED], swizzled)
    out_buf = gl.allocate_shared_memory(dtype, [2, R, PADDED], swizzled)
    q_bars, k_bars, v_bars = _barriers(1), _barriers(STAGES), _barriers(STAGES)
    rings = (q_buf, q_bars, k_buf, k_bars, v_buf, v_bars)
    sizes, edges = (B, H, G, T, S, section), (below, above)
    gl.warp_specialize([
        (attend, (rings, out_buf, out_desc, lse2_ptr, sizes, edges, scale_log2, 0, LEFT, RIGHT, TAIL)),
        (attend, (rings, out_buf, out_desc, lse2_ptr, sizes, edges, scale_log2, 1, LEFT, RIGHT, TAIL)),
        (_load, (rings, q_desc, k_desc, v_desc, sizes, edges, LEFT, RIGHT)),
    ], [4, 1], [CONSUMER, PRODUCER])


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    """Make (full, empty) for each buffer of a ring: one warp fills it, two consumers empty it."""
    full = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    return full, empty


# --- the warp that loads ---------------------------------------------------------------------------------------------


@gluon.jit
def _load(rings, q_desc, k_desc, v_desc, sizes, edges, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Bring all tiles of this program's turns into the rings."""
    q_buf, q_bars, k_buf, k_bars, v_buf, v_bars = rings
    B, H, G, T, S, section = sizes
    R: gl.constexpr = q_buf.shape[1]
    BM: gl.constexpr = 2 * R
    BN: gl.constexpr = k_buf.shape[1]
    q_full, q_empty = q_bars
    tiles = gl.cdiv(T, BM)
    step = 0  # tiles of keys so far, over all turns
    for turn in range(turns(B * H * tiles)):
        head, tile = place(turn, B * H, tiles, section)
        b, h = head // H, head % H
        first, n = keys_seen(tile * BM, S, edges, BM, BN, LEFT, RIGHT)
        mbarrier.wait(q_empty.index(0), turn & 1 ^ 1)
        mbarrier.expect(q_full.index(0), 2 * q_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_desc, [b, h, tile * BM, 0], q_full.index(0), q_buf.index(0))
        tma.async_copy_global_to_shared(q_desc, [b, h, tile * BM + R, 0], q_full.index(0), q_buf.index(1))
        for i in range(n):
            key = first + (n - 1 - i) * BN
            _fill(k_buf, k_bars, k_desc, step, b, h // (H // G), key)
            _fill(v_buf, v_bars, v_desc, step, b, h // (H // G), key)
            step += 1


@gluon.jit
def _fill(buf, bars, desc, step, b, g, key):
    """Fill the ring's next buffer, once it is empty; `full` is complete when the bytes have arrived."""
    STAGES: gl.constexpr = buf.shape[0]
    full, empty = bars
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), step // STAGES & 1 ^ 1)  # the first time it has never been full: the phase before
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [b, g, key, 0], full.index(slot), buf.index(slot))
