"""The backward of a head's loss as two Triton kernels, each of which computes the tiles of logits again.

    dh[i] += g W[j]        by a program for each tile i of rows, which passes over the words
    dW[j] += gᵀ h[i]       by a program for each tile j of words, which passes over the rows

The sums are too wide for registers: they are in memory, in fp32 (dW's may be in 16 bits, rounded by each tile of rows),
and belong to one program each, so that no two add to the same number, and every run gives the same bits. A tile of g is
used for all C features before the next is computed.

**Skipping.** Softmax gives most words of a trained model next to nothing. With `skip` δ > 0, a tile in which no element
of g is above δ in absolute value is left out of both sums. What a row loses is at most its left-out mass,

    |Δdh_i| ≤ s · Σ_{j left out} |g_ij| · max_j |W_j| ≤ s · min(1 + ε, V·δ) · max_j |W_j|

without z-loss, where s is the row's factor, and |ΔW_j| ≤ δ · s Σ_i |h_i|. δ = 2⁻¹² is below what a 16-bit sum that has
reached 1 can take up. The first kernel notes which tiles it has used, a byte each; the second does not compute the
others. Tiles of a row's target are never skipped, as |g| is near 1 there, unless the model already knows it.

Both kernels add to what is in memory, so several losses of one head have one dW, each times its own scale.

"Cut Your Losses in Large-Vocabulary Language Models" (Wijmans et al. 2024), section 4.3 and 4.4, whose kernel adds to
both sums at once, with locks.
"""

import torch
import triton
import triton.language as tl

from .kernels.configs import config_for
from .kernels.tile import Launch, block, capped_logits, gradient, inside


@triton.jit
def add_product(a_AB, b_ptr, b_rows, b_count, out_ptr, out_rows, out_count, shape, K: tl.constexpr):
    """Add a · b to some rows of a matrix in memory, K columns at a time."""
    for first in tl.range(0, shape.C, K):
        b_BK = tl.load(block(b_ptr, b_rows, first, shape, K), inside(b_rows, b_count, first, shape, K), 0.0)
        at, here = block(out_ptr, out_rows, first, shape, K), inside(out_rows, out_count, first, shape, K)
        so_far_AK = tl.load(at, here, 0.0).to(tl.float32)
        total_AK = tl.dot(a_AB.to(b_BK.dtype), b_BK, so_far_AK, input_precision="ieee")  # 16-bit operands, fp32 sums
        tl.store(at, total_AK, here)
    tl.debug_barrier()  # another thread of this program may read next what this one has written


@triton.jit
def hidden_kernel(h_ptr, w_ptr, bias_ptr, targets_ptr, lse_ptr, dh_ptr, used_ptr, shape, loss, skip, M: tl.constexpr,
                  V: tl.constexpr, K: tl.constexpr, CAPPED: tl.constexpr):
    """Add to dh of M rows; write which tiles of words were used: used (tiles of rows, tiles of words)."""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    target_M = tl.load(targets_ptr + rows, rows < shape.N, loss.ignore_index)
    lse_M = tl.load(lse_ptr + rows, rows < shape.N, 0.0)
    used_ptr += tl.program_id(0) * tl.cdiv(shape.V, V)
    for tile in tl.range(0, tl.cdiv(shape.V, V)):
        words = tile * V + tl.arange(0, V)
        z_MV, tanh_MV = capped_logits(h_ptr, w_ptr, bias_ptr, rows, words, shape, loss, M, V, K, CAPPED)
        g_MV = gradient(z_MV, tanh_MV, target_M, lse_M, words, shape, loss, CAPPED)
        used = tl.max(tl.abs(g_MV)) > skip
        tl.store(used_ptr + tile, used.to(tl.int8))
        if used:
            add_product(g_MV, w_ptr, words, shape.V, dh_ptr, rows, shape.N, shape, K)


@triton.jit
def weight_kernel(h_ptr, w_ptr, bias_ptr, targets_ptr, lse_ptr, scale_ptr, dw_ptr, db_ptr, used_ptr, shape, loss, skip,
                  M: tl.constexpr, V: tl.constexpr, K: tl.constexpr, CAPPED: tl.constexpr):
    """Add to dW and db of V words, times a scale. `used_ptr`: what `hidden_kernel` wrote, or None."""
    tile = tl.program_id(0)
    words = tile * V + tl.arange(0, V)
    bias_V, scale = tl.zeros([V], tl.float32), tl.load(scale_ptr)
    for number in tl.range(0, tl.cdiv(shape.N, M)):
        rows = number * M + tl.arange(0, M)
        wanted = True
        if used_ptr is not None:
            wanted = tl.load(used_ptr + number * tl.cdiv(shape.V, V) + tile) != 0
        if wanted:
            target_M = tl.load(targets_ptr + rows, rows < shape.N, loss.ignore_index)
            lse_M = tl.load(lse_ptr + rows, rows < shape.N, 0.0)
            z_MV, tanh_MV = capped_logits(h_ptr, w_ptr, bias_ptr, rows, words, shape, loss, M, V, K, CAPPED)
            g_MV = gradient(z_MV, tanh_MV, target_M, lse_M, words, shape, loss, CAPPED)
            if tl.max(tl.abs(g_MV)) > skip:
                g_MV *= scale
                bias_V += tl.sum(g_MV, 0)
                add_product(g_MV.T, h_ptr, rows, shape.N, dw_ptr, words, shape.V, shape, K)
    if db_ptr is not None:
        tl.store(db_ptr + words, bias_V + tl.load(db_ptr + words, words < shape.V, 0.0), words < shape.V)


def backward_launches(hidden, weight, bias, targets, lse, scale, dh, dw, db, used, shape, loss, skip, configs):
    """Return the Launches of a backward, hidden's and weight's; those whose gradient is None are not there. `used`:
    (tiles of rows, tiles of words) in int8, or None without dh. `skip`: −1 skips nothing."""
    common = {"h_ptr": hidden, "w_ptr": weight, "bias_ptr": bias, "targets_ptr": targets, "lse_ptr": lse,
              "used_ptr": used, "shape": shape, "loss": loss, "skip": float(skip), "CAPPED": loss.softcap != 0}
    launches = []
    for kernel, total, config, programs in (
            (hidden_kernel, {"dh_ptr": dh}, configs[0], shape.N),
            (weight_kernel, {"dw_ptr": dw, "db_ptr": db, "scale_ptr": scale}, configs[1], shape.V)):
        if next(iter(total.values())) is not None:  # a gradient that nobody wants has no launch
            size = config.block_m if kernel is hidden_kernel else config.block_v
            launches.append(Launch(kernel, (triton.cdiv(programs, size),), {
                **common, **total, "M": config.block_m, "V": config.block_v, "K": config.block_k}, config))
    return launches


def empty_used(hidden, V, config):
    """Make the memory in which the first kernel notes its tiles: (tiles of rows, tiles of words) in int8."""
    return hidden.new_empty((triton.cdiv(len(hidden), config.block_m), triton.cdiv(V, config.block_v)),
                            dtype=torch.int8)


def backward(hidden, weight, bias, targets, lse, scale, dh, dw, db, used, shape, loss, skip, configs=None):
    """Add the gradients of the sum of the rows' losses to dh, and those times `scale`, one number, to dW and db: in
    fp32, dW in any dtype; None for what is not asked. Write to `used` which tiles were not skipped; None without dh."""
    configs = configs or [config_for(kernel, hidden.device, hidden.dtype, loss.softcap != 0)
                          for kernel in ("hidden", "weight")]
    for launch in backward_launches(hidden, weight, bias, targets, lse, scale, dh, dw, db, used, shape, loss, skip,
                                    configs):
        if shape.N:
            launch.run(hidden.device)
