"""Drawn programs for PyTorch's own allocator: `python drawn.py FOLDER FIRST LAST`, a recording for each seed.

A program takes and frees blocks of all kinds on three streams, in a pool of its own and while a graph is captured, with
a limit or without, and empties the cache now and then.
"""

import json
import os
import random
import re
import sys
from pathlib import Path

import torch

MIB = 2**20
SIZES = [(1, 2048), (2048, MIB), (MIB, 10 * MIB), (10 * MIB, 40 * MIB), (40 * MIB, 150 * MIB)]
LIMIT = 700 * MIB
SAYS_ITS_POOL = torch.__version__ >= (2, 13)  # else an event's pool is known alone while its segments are there
# Up to 2.12 segments of a private pool go with max_split_size, and expandable ones end in an error of PyTorch's own.
POOLS = SAYS_ITS_POOL or not re.search("expandable|max_split", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def take(dice):
    """Return a block: of a size that is drawn, or of one of a few that come again and again."""
    nbytes = dice.choice([512, 3 * 512, MIB, MIB + 512, 2 * MIB, 9 * MIB, 20 * MIB, 64 * MIB]) if dice.random() < 0.4 \
        else dice.randrange(*dice.choices(SIZES, weights=(4, 4, 4, 2, 1))[0])
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


def program(seed):
    """Run the program of a seed; what is live at its end is returned, and so are its pools."""
    dice, live, kept = random.Random(seed), [], []
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in range(2))]
    pool = torch.cuda.MemPool() if dice.random() < 0.4 and POOLS else None
    for _ in range(dice.randrange(50, 250)):
        chance = dice.random()
        try:
            if chance < 0.5 or not live:
                with torch.cuda.stream(dice.choices(streams, weights=(6, 1, 1))[0]):
                    if pool is not None and dice.random() < 0.3:
                        with torch.cuda.use_mem_pool(pool):
                            live.append(take(dice))
                    else:
                        live.append(take(dice))
            elif chance < 0.94:
                block = live.pop(dice.randrange(len(live)))
                if dice.random() < 0.1:
                    block.record_stream(dice.choice(streams))
                del block
            elif chance < 0.96:
                torch.cuda.synchronize()
            elif chance < 0.98:
                torch.cuda.empty_cache()
            elif chance < 0.985 and POOLS:
                kept.append(captured(dice, live))
                if dice.random() < 0.5 and SAYS_ITS_POOL:
                    del kept[dice.randrange(len(kept))]
        except torch.OutOfMemoryError:
            del live[::2]
    return live, pool, kept


def captured(dice, live):
    """Take and free blocks while a graph is captured, some of them live beyond it; return the graph."""
    graph, inside = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(dice.randrange(2, 12)):
            if inside and dice.random() < 0.5:
                del inside[dice.randrange(len(inside))]
            else:
                inside.append(take(dice))
        live += inside[: len(inside) // 2]
        del inside
    return graph


def main(folder, first, last):
    """Record each program, with what the device has."""
    torch.cuda.init()
    total = torch.cuda.mem_get_info()[1]
    for seed in range(first, last):
        fraction = LIMIT / total if seed % 2 else None
        torch.cuda.set_per_process_memory_fraction(fraction or 1.0)
        torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
        ended = program(seed)
        torch.cuda.synchronize()
        path = Path(folder) / f"{seed}.pickle"
        torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
        path.with_suffix(".json").write_text(json.dumps({"total": total, "fraction": fraction}))
        del ended
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0, seed


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
