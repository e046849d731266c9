"""Kernels that show a part of a larger one at work."""

import torch
import triton
import triton.language as tl

from refimpl.attention.triton_hopper import place, turns


@triton.jit
def _write_places(out_ptr, heads, tiles, section, ROUNDS: tl.constexpr):
    program = tl.program_id(0)
    for turn in range(turns(heads * tiles)):
        head, tile = place(turn, heads, tiles, section)
        tl.store(out_ptr + program * ROUNDS + turn, head * tiles + tile)


def places(programs, heads, tiles, section):
    """(programs, rounds): head · tiles + tile in the order of each program's turns, −1 where it has none."""
    out = torch.full((programs, heads * tiles // programs + 2), -1, dtype=torch.int32)
    _write_places[(programs,)](out, heads, tiles, section, out.shape[1])
    return out


@triton.jit
def _draw(seed, threshold, words_ptr, rand_ptr, mask_ptr, head, row, group, M: tl.constexpr, N: tl.constexpr):
    rows, groups = row + tl.arange(0, M), group + tl.arange(0, N)
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    c0, c1 = tl.broadcast(groups[None, :], rows[:, None])
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c0 * 0 + head, c0 * 0)
    tl.store(words_ptr + at, w0.to(tl.int64))
    tile = tl.join(tl.join(w0, w2), tl.join(w1, w3)).reshape(M, 4 * N)
    wide = tl.arange(0, M)[:, None] * 4 * N + tl.arange(0, 4 * N)[None, :]
    tl.store(mask_ptr + wide, (tile.to(tl.int64) < threshold).to(tl.int8))
    w0, w1, w2, w3 = tl.randint4x(seed, at)
    tl.store(rand_ptr + at, w2.to(tl.int64))


def drawn(seed, threshold, head, row, group, M, N):
    """(first words, third words of tl.randint4x, mask) of the tile of M rows and 4 · N columns at (row, 4 · group)."""
    first, third = torch.zeros(M, N, dtype=torch.int64), torch.zeros(M, N, dtype=torch.int64)
    mask = torch.zeros(M, 4 * N, dtype=torch.int8)
    _draw[(1,)](seed, threshold, first, third, mask, head, row, group, M, N)
    return first, third, mask
