"""Kernels that show a part of a larger one at work."""

import torch
import triton
import triton.language as tl

from refimpl.attention.hopper import _place, _turns


@triton.jit
def _write_places(out_ptr, heads, tiles, section, ROUNDS: tl.constexpr):
    program = tl.program_id(0)
    for turn in range(_turns(heads * tiles)):
        head, tile = _place(turn, heads, tiles, section)
        tl.store(out_ptr + program * ROUNDS + turn, head * tiles + tile)


def places(programs, heads, tiles, section):
    """(programs, rounds): head · tiles + tile in the order of each program's turns, −1 where it has none."""
    out = torch.full((programs, heads * tiles // programs + 2), -1, dtype=torch.int32)
    _write_places[(programs,)](out, heads, tiles, section, out.shape[1])
    return out
