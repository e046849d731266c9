"""Tile sizes for each kernel: a table; nothing is tuned at run time.

A tile has M rows of hidden and V words; its logits are sums over C in blocks of K. The two backward kernels read a tile
of the gradient's sums from memory, add to it, and write it back, for each tile of logits: the larger M and V, the fewer
times. `python -m refimpl bench kernels` compiles them all and prints registers and spills. With a softcap a program
holds another tile, tanh, and the backward kernels take half as many words: else the weight's, with all terms of the
loss, spills 816 bytes in Triton 3.7 and 840 in 3.6. None of the 27 variants spills in either, those of a split
vocabulary among them.
"""

from typing import NamedTuple

import torch


class Config(NamedTuple):
    """A tile of block_m rows and block_v words, features in blocks of block_k; warps of a program, loads under way."""

    block_m: int
    block_v: int
    block_k: int
    num_warps: int
    num_stages: int


KERNELS = ("forward", "hidden", "weight")

# (chip, bytes of an element) → a Config for each of KERNELS; hidden and weight share M and V: they skip one tile.
# "datacenter": sm_90 and sm_100, 227 KB of shared memory; "any": 99 KB, which every chip since sm_80 has.
TABLE = {
    ("datacenter", 2): (Config(128, 128, 64, 8, 3), Config(128, 128, 64, 8, 2), Config(128, 128, 64, 8, 2)),
    ("any", 2): (Config(128, 128, 32, 8, 2), Config(64, 64, 32, 8, 2), Config(64, 64, 32, 8, 2)),
    ("any", 4): (Config(64, 64, 32, 8, 2), Config(32, 32, 32, 8, 2), Config(32, 32, 32, 8, 2)),
}
INTERPRETED = Config(32, 64, 64, 4, 1)


def config_for(kernel, device, dtype, capped=False):
    """Return the Config of one of KERNELS for hidden states of a dtype. A GPU that is not here counts as an H100."""
    if torch.device(device).type == "cpu":
        return INTERPRETED
    if not torch.cuda.is_available():
        return look_up(kernel, "datacenter", dtype.itemsize, capped)
    datacenter = torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))
    return look_up(kernel, "datacenter" if datacenter else "any", dtype.itemsize, capped)


def words_at_once(V, device):
    """Return how many of V words have sums, or a cast, apart from the whole weight at a time: 128 for each of a GPU's
    multiprocessors, one program's or two's; on a CPU a quarter. Tiles are whole."""
    if torch.device(device).type == "cpu":
        return max(1, -(-V // (4 * INTERPRETED.block_v))) * INTERPRETED.block_v
    here = torch.cuda.is_available()
    return 128 * (torch.cuda.get_device_properties(device).multi_processor_count if here else 132)


def look_up(kernel, chip, itemsize, capped=False):
    """Return the Config for a chip of the table and elements of `itemsize` bytes. `capped`: with a softcap."""
    row = TABLE.get((chip, itemsize)) or TABLE["any", itemsize]
    config = row[KERNELS.index(kernel)]
    # tanh is one tile more in registers
    return config._replace(block_v=config.block_v // 2) if capped and kernel != "forward" else config
