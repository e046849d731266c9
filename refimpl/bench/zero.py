"""Each stage of ZeRO beside torch's own: DDP, DDP with ZeroRedundancyOptimizer, and FSDP2 with each block sharded.

Four ranks train a GPT of 14 million parameters, each engine alone in ranks of its own for its bytes, all of them in
turns in the same ranks for its time. Bytes are the allocator's, per parameter, on the rank that takes most.
"""

import functools
import statistics
import time
from dataclasses import asdict

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from .. import memory
from ..comm import launch
from ..model import GPT, GPTConfig
from ..zero import DataParallel, Zero1, Zero2, Zero3
from .record import row
from .runner import BAR_DELAY, Comparison, synchronize

CONFIG = GPTConfig(vocab_size=8192, context_length=64, layers=6, hidden=384, heads=6)
WORLD, ROWS = 4, 1  # ranks, and sequences of a rank in a step
BUCKET_BYTES, LOOK_AHEAD = 2**20, 2**21  # of gradients, and elements of parameters, on their way at once
LEARNING_RATE = 1e-4
DDP, REDUNDANCY, FSDP2 = "DistributedDataParallel", "ZeroRedundancyOptimizer", "FSDP2"
HELD = {"DataParallel": (DDP, None), "Zero1": (REDUNDANCY, 0.9), "Zero2": (REDUNDANCY, None), "Zero3": (FSDP2, 0.8)}


class Ours:
    """An engine of `refimpl.zero`: `step(tokens)` is one training step."""

    def __init__(self, stage, model, comm):
        options = {"look_ahead": LOOK_AHEAD} if stage is Zero3 else {}
        self.engine = stage(model, comm, functools.partial(torch.optim.AdamW, lr=LEARNING_RATE),
                            bucket_bytes=BUCKET_BYTES, **options)

    def step(self, tokens):
        self.engine.backward(self.engine.forward(tokens, tokens))
        self.engine.step()


class Theirs:
    """DDP with gradients that are views of its buckets, or FSDP2: what torch's documentation says to write."""

    def __init__(self, name, model, comm):
        if name == FSDP2:
            for block in model.blocks:
                fully_shard(block)
            self.model = fully_shard(model)
        else:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = (ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE)
                          if name == REDUNDANCY else torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE))

    def step(self, tokens):
        self.model(tokens, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


ENGINES = {**{stage.__name__: functools.partial(Ours, stage) for stage in (DataParallel, Zero1, Zero2, Zero3)},
           **{name: functools.partial(Theirs, name) for name in (DDP, REDUNDANCY, FSDP2)}}


def run(device="cpu", config=CONFIG, world=WORLD, rounds=15):
    """Bytes per parameter and seconds of a step of every engine: (settings, rows)."""
    gpus = torch.cuda.device_count() if torch.device(device).type == "cuda" else 0
    device = "cuda" if gpus >= world else "cpu"  # DDP and FSDP2 have no way for CUDA tensors but NCCL
    settings = {"model": asdict(config), "parameters": config.parameter_count(), "dtype": "fp32", "ranks": world,
                "sequences of a rank": ROWS, "tokens on": device, "rounds": rounds, "bucket_bytes": BUCKET_BYTES,
                "look_ahead": LOOK_AHEAD, "optimizer": "AdamW",
                "peak": "allocated bytes of the third step and of what the rank held before it, without the tokens"}
    held = {}
    for name in tqdm(ENGINES, "bytes", delay=BAR_DELAY, leave=False):
        answers = launch(bytes_of, world, name, config, device=device, timeout=300)
        held[name] = [max(each) / config.parameter_count() for each in zip(*answers, strict=True)]
    seconds = slowest(launch(seconds_of, world, config, rounds, device=device, timeout=900))
    return settings, byte_rows(held) + time_rows(Comparison(seconds), seconds)


def byte_rows(held):
    """Peak of a step, beside the peer's; `resident`: what is held between two steps, `making`: the peak of making it
    and of the first step."""
    rows = []
    for name, (peer, bound) in HELD.items():
        (peak, resident, making), theirs = held[name], held[peer]
        rows.append(row(f"peak of a step, {name}", peer, "B/parameter", peak, theirs[0], bound=bound,
                        resident=resident, peer_resident=theirs[1], making=making, peer_making=theirs[2]))
    return rows


def time_rows(timing, seconds):
    """Median seconds of a step, beside the peer's. `paired`: the median ratio of two steps of the same round."""
    rows = []
    for name, (peer, bound) in HELD.items():
        paired = statistics.median(ours / theirs for ours, theirs in zip(seconds[name], seconds[peer], strict=True))
        rows.append(row(f"step, {name}", peer, "s", timing.median(name), timing.median(peer), paired=paired,
                        bound=1.0 if bound else None, spread=timing.spread(name), peer_spread=timing.spread(peer)))
    return rows


def slowest(ranks):
    """{engine: seconds of each round}: a step lasts until the last rank is done."""
    return {name: list(map(max, *(rank[name] for rank in ranks))) for name in ranks[0]}


# --- in a rank -------------------------------------------------------------------------------------------------------


def made(name, comm, config):
    """(engine, tokens) on the rank's device."""
    torch.manual_seed(0)
    engine = ENGINES[name](GPT(config, device=comm.device), comm)
    torch.manual_seed(comm.rank)
    return engine, torch.randint(0, config.vocab_size, (ROWS, config.context_length), device=comm.device)


def bytes_of(comm, name, config):
    """(peak of a step, held between two steps, peak of the making and the first steps), in bytes."""
    with memory.measure(comm.device) as making:
        engine, tokens = made(name, comm, config)
        for _ in range(2):
            engine.step(tokens)
    with memory.measure(comm.device) as step:
        engine.step(tokens)
    return making.net + step.peak, making.net, making.peak


def seconds_of(comm, config, rounds):
    """{engine: seconds of each round}, all engines in turns, every rank at the same step."""
    engines = {name: made(name, comm, config) for name in ENGINES}
    seconds = {name: [] for name in engines}
    for turn in range(rounds + 3):
        for name, (engine, tokens) in engines.items():
            comm.barrier()
            start = time.perf_counter()
            engine.step(tokens)
            synchronize()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - start)
    return seconds
