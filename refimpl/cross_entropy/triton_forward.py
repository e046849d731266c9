"""The forward of a head's loss as a Triton kernel: tiles of logits stay in registers, a row leaves three numbers.

Program (i, s) has rows tile i and part s of the vocabulary. It passes over its words with an online softmax:

    m' = max(m, max_j z_j)      l' = l · exp(m − m') + Σ_j exp(z_j − m')          then lse = m + log l
    and, on the way, the logit of the target, if it is among the words, and Σ_j z_j

The parts are put together by another logsumexp, over a few numbers for each row. Of N · V logits none is written.

"Cut Your Losses in Large-Vocabulary Language Models" (Wijmans et al. 2024), section 4.1 and 4.2.
"""

import torch
import triton
import triton.language as tl

from .kernels.configs import config_for
from .kernels.tile import Launch, capped_logits

PROGRAMS = 264  # about two for each of an H100's 132 multiprocessors
LARGEST_SPLIT = 32  # parts of a vocabulary


@triton.jit
def forward_kernel(h_ptr, w_ptr, bias_ptr, targets_ptr, out_ptr, tiles, shape, loss, M: tl.constexpr, V: tl.constexpr,
                   K: tl.constexpr, CAPPED: tl.constexpr):
    """Write lse, the target's logit and the sum of logits of M rows over `tiles` tiles of V words; out (parts, 3, N)"""
    rows = tl.program_id(0) * M + tl.arange(0, M)
    first = tl.program_id(1) * tiles * V
    target_M = tl.load(targets_ptr + rows, rows < shape.N, loss.ignore_index)
    m_M = tl.full([M], -float("inf"), tl.float32)
    l_M, predicted_M, sum_M = tl.zeros([M], tl.float32), tl.zeros([M], tl.float32), tl.zeros([M], tl.float32)
    for tile in tl.range(0, tiles):
        words = first + tile * V + tl.arange(0, V)
        if first + tile * V < shape.V:  # the last part may have fewer tiles
            z_MV, _ = capped_logits(h_ptr, w_ptr, bias_ptr, rows, words, shape, loss, M, V, K, CAPPED)
            m_new_M = tl.maximum(m_M, tl.max(z_MV, 1))
            l_M = l_M * tl.exp(m_M - m_new_M) + tl.sum(tl.exp(z_MV - m_new_M[:, None]), 1)
            m_M = m_new_M
            predicted_M += tl.sum(tl.where(words[None, :] == target_M[:, None], z_MV, 0.0), 1)
            sum_M += tl.sum(tl.where((words < shape.V)[None, :], z_MV, 0.0), 1)
    out_ptr += tl.program_id(1) * 3 * shape.N + rows
    tl.store(out_ptr, m_M + tl.log(l_M), rows < shape.N)
    tl.store(out_ptr + shape.N, predicted_M, rows < shape.N)
    tl.store(out_ptr + 2 * shape.N, sum_M, rows < shape.N)


def parts_of(N, V, config):
    """Return (parts, tiles of each): as many parts of the vocabulary as give every multiprocessor work."""
    tiles = triton.cdiv(V, config.block_v)
    parts = max(1, min(LARGEST_SPLIT, tiles, PROGRAMS // max(1, triton.cdiv(N, config.block_m))))
    each = triton.cdiv(tiles, parts)
    return triton.cdiv(tiles, each), each


def forward_launch(hidden, weight, bias, targets, out, shape, loss, config):
    """Return the Launch of a forward. `out`: (parts, 3, N) in fp32."""
    parts, tiles = parts_of(shape.N, shape.V, config)
    return Launch(forward_kernel, (triton.cdiv(shape.N, config.block_m), parts), {
        "h_ptr": hidden, "w_ptr": weight, "bias_ptr": bias, "targets_ptr": targets, "out_ptr": out, "tiles": tiles,
        "shape": shape, "loss": loss, "M": config.block_m, "V": config.block_v, "K": config.block_k,
        "CAPPED": loss.softcap != 0}, config)


def forward(hidden, weight, bias, targets, shape, loss, config=None):
    """Return (parts, 3, N) in fp32: of each part of the vocabulary the rows' logsumexp, the target's logit (0 where it
    is not in this part, or ignored) and the sum of logits. `combined` puts the parts together."""
    config = config or config_for("forward", hidden.device, hidden.dtype)
    out = empty_parts(hidden, shape.V, config)
    if shape.N:
        forward_launch(hidden, weight, bias, targets, out, shape, loss, config).run(hidden.device)
    return out


def empty_parts(hidden, V, config):
    """Make the memory that a forward fills: (parts, 3, N) in fp32."""
    return hidden.new_empty((parts_of(len(hidden), V, config)[0], 3, len(hidden)), dtype=torch.float32)


def combined(parts):
    """Return (lse, target's logit, sum of logits), (N,) each, of the whole vocabulary. Overwrites `parts`."""
    m_N = parts[:, 0].amax(0)
    parts[:, 0].sub_(m_N).exp_()
    sums = parts.sum(0)
    return m_N.add_(sums[0].log_()), sums[1], sums[2]
