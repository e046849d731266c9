"""The hooks of `scores.py` in the kernels: which keys a query sees, a score after the hooks, and its derivative.

A hook that a call does not have is None in `Score`, a constant of the compiled kernel: its lines are not compiled, and
without any hook a kernel is what it would be without this file. All functions take positions `rows` and `keys` that
broadcast, so that they serve a tile (M, N) and its transpose.
"""

import triton
import triton.language as tl

from .tile import LOG2E, fully_masked, sees


@triton.jit
def in_base_2(scale, score):
    """Return what a tile of scores is multiplied by before 2^x; a hook has scaled them already."""
    if score.any is None:
        return scale * LOG2E
    else:
        return LOG2E


@triton.jit
def changed(s_tile, score, scale, head, rows, keys, T, S):
    """Return a tile of q·k after the hooks that are no masks: `ScoreHook.forward`. Without hooks it is as given."""
    if score.any is not None:
        s_tile = s_tile * scale  # hooks see scaled scores; `in_base_2` then leaves the scale out
    if score.softcap is not None:
        s_tile = tanh(s_tile / score.softcap) * score.softcap
    if score.slopes is not None:
        s_tile -= tl.load(score.slopes + head).to(tl.float32) * tl.abs(rows + (S - T) - keys)
    return s_tile


@triton.jit
def differentiated(ds_tile, s_tile, score, scale):
    """Return dS of a tile from dS' and q·k: times `ScoreHook.derivative`."""
    if score.softcap is not None:
        tanh_tile = tanh(s_tile * scale / score.softcap)
        ds_tile = ds_tile * (1 - tanh_tile * tanh_tile)
    return ds_tile


@triton.jit
def tanh(x):
    """Return tanh(x); the difference is exact to fp32's rounding of 1, which a softcap of cap makes 6e-8 · cap."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def seen_by(rows, keys, T, S, band, score, index):
    """Return True where a query sees a key: by the band, and by the masks of the hooks. `index`: of the sequence."""
    seen = sees(rows, keys, T, S, band)
    position = rows + (S - T)
    if score.documents is not None:
        ids = score.documents + tl.cast(index, tl.int64) * score.keys  # B · S may exceed 32 bits
        inside = (position >= 0) & (rows < T)
        seen = seen & inside & (tl.load(ids + position, mask=inside, other=0)
                                == tl.load(ids + keys, mask=keys < S, other=0))
    if score.prefix is not None:
        seen = seen & ((keys <= position) | (keys < tl.load(score.prefix + index)))
    return seen


@triton.jit
def sees_something(l_M, rows, T, S, band, score, sinks):
    """Return True for rows whose sum l of weights is to be divided by. By position: where all scores seen are −∞, 0/0
    is right. With a hook or a sink by the sum: what a hook makes −∞ is not seen."""
    if score.any is None:
        if sinks is None:
            seeing_M = (rows >= fully_masked(T, S, band)) & (rows < T)
        else:
            seeing_M = l_M != 0
    else:
        seeing_M = l_M != 0
    return seeing_M


@triton.jit
def last_key(end, last_row, T, S, score, index):
    """Return the end of the keys that the queries up to `last_row` see, if a prefix leaves fewer than `end`."""
    if score.prefix is not None:
        end = tl.minimum(end, tl.maximum(last_row + 1 + (S - T), tl.load(score.prefix + index).to(tl.int32)))
    return end


@triton.jit
def first_row(begin, key, T, S, score, index):
    """Return the first of the queries that see key `key` or a later one, if a prefix leaves fewer than those from
    `begin` on."""
    if score.prefix is not None:
        begin = tl.where(key < tl.load(score.prefix + index), begin, tl.maximum(begin, key - (S - T)))
    return begin
