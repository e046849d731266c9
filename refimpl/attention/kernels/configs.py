"""Tile sizes for each kernel: a table; nothing is tuned at run time.

A tile of M queries and N keys should be large: each tile of Q is read once for all keys, each of K and V once for
every M queries. The chip bounds it: shared memory holds `num_stages` tiles on their way in, and the registers,
255 for each of 32 · `num_warps` threads and 64 Ki for all, hold the accumulators (M · D and M · N in fp32). What
does not fit in registers is spilled to memory, at many times the cost. No entry below asks for more shared memory than
there is, and few spill: of 135 variants two in Triton 3.7 (8 and 16 bytes), one in 3.6 (32 bytes).
`python -m refimpl bench kernels` compiles them all and prints it.

What the compiler showed for an H100: the forward at D = 128 spills with 4 warps; dK and dV, two accumulators, need
fewer queries than keys in a tile (at D = 128, 64 of them spill 64 to 240 bytes in Triton 3.6, 32 none). A mask of
dropout takes registers, too: then the tile that the loop passes over is half as long, and still the matrix products of
the forward and of dQ wait for one another (ptxas' remark C7515). Hooks on scores fit into the tiles as they are: up to
D = 192 none of 42 variants spills, in Triton 3.6 and 3.7, though documents take up to 255 registers. At D = 256 dK and
dV keep 2 × 64 × 256 numbers, and with a hook two or four registers of a thread do not fit: 16 bytes with Gemma 2's
softcap and 32 with documents in 3.7, none of either in 3.6, 16 with ALiBi there. Half of the queries in a tile still
spill 8 with a softcap, so the tile stays (benchmarks/compiler/scores.py).
"""

from typing import NamedTuple

import torch


class Config(NamedTuple):
    """A tile of block_m queries and block_n keys, `num_warps` warps to work on it, `num_stages` loads under way."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


KERNELS = ("forward", "dkdv", "dq")

# (chip, bytes of an element, largest head_dim) → a Config for each of KERNELS.
# "datacenter": sm_90 and sm_100, 227 KB of shared memory; "any": 99 KB, which every chip since sm_80 has.
TABLE = {
    ("datacenter", 2, 64): (Config(128, 128, 8, 3), Config(64, 128, 8, 3), Config(128, 64, 8, 3)),
    ("datacenter", 2, 128): (Config(128, 64, 8, 3), Config(32, 128, 8, 3), Config(128, 64, 8, 2)),
    ("datacenter", 2, 256): (Config(64, 64, 8, 2), Config(32, 64, 8, 2), Config(128, 32, 8, 2)),
    ("any", 2, 64): (Config(128, 64, 8, 2), Config(32, 64, 8, 2), Config(64, 64, 4, 2)),
    ("any", 2, 128): (Config(64, 64, 8, 2), Config(64, 64, 8, 2), Config(64, 64, 8, 2)),
    ("any", 2, 256): (Config(64, 32, 8, 2), Config(32, 32, 8, 2), Config(64, 32, 8, 1)),
    ("any", 4, 64): (Config(64, 32, 8, 2), Config(32, 32, 8, 2), Config(32, 32, 8, 2)),
    ("any", 4, 128): (Config(32, 32, 8, 1), Config(32, 32, 8, 2), Config(32, 32, 8, 2)),
    ("any", 4, 256): (Config(32, 16, 8, 2), Config(16, 16, 8, 2), Config(16, 32, 8, 1)),
}
DELTA = Config(32, 0, 4, 1)  # no keys, no loop
INTERPRETED = Config(64, 64, 4, 1)


def config_for(kernel, q_BHTD, v_BGSV, problem):
    """Return the Config of one of KERNELS for queries and values like these, and what a `Problem` has beside them."""
    if q_BHTD.device.type == "cpu":
        return INTERPRETED
    D = max(q_BHTD.shape[-1], v_BGSV.shape[-1])
    return look_up(kernel, chip_of(q_BHTD.device), q_BHTD.dtype.itemsize, D, problem.dropout is not None)


def chip_of(device):
    """Return the table's name for a CUDA device."""
    return "datacenter" if torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3)) else "any"


def look_up(kernel, chip, itemsize, D, dropout=False):
    """Return the Config for a head_dim of D (the larger one of q's and v's) and elements of `itemsize` bytes."""
    bound = next(bound for bound in (64, 128, 256) if D <= bound)
    row = TABLE.get((chip, itemsize, bound)) or TABLE["any", itemsize, bound]
    config = row[KERNELS.index(kernel)]
    if dropout and kernel == "dkdv":
        return config._replace(block_m=max(16, config.block_m // 2))  # 16: the least that tl.dot takes
    return config._replace(block_n=max(16, config.block_n // 2)) if dropout else config
