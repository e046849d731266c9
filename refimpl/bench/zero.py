"""Each stage of ZeRO beside torch's: DDP, DDP with ZeroRedundancyOptimizer, and FSDP2 with each block sharded.

Four ranks train a GPT of 14 million parameters. For bytes, each engine runs alone in its own ranks. For time, all
engines take turns in the same ranks. Bytes are per parameter, on the rank that takes most, as the allocator alone reads
them; the tracker, in another step, holds what is between two steps to that within 1 %.
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
BUCKET_BYTES, LOOK_AHEAD = 2**22, 2**21  # bytes of a bucket of gradients, and elements of parameters prefetched
LEARNING_RATE = 1e-4
DDP, REDUNDANCY, FSDP2 = "DistributedDataParallel", "ZeroRedundancyOptimizer + DDP", "FSDP2"
LEAN_DDP, LEAN = f"{DDP}, gradients as views of buckets", f"{REDUNDANCY}, gradients as views of buckets"
PAIRS = [("DataParallel", DDP), ("DataParallel", LEAN_DDP), ("Zero1", REDUNDANCY), ("Zero1", LEAN),
         ("Zero2", REDUNDANCY), ("Zero2", LEAN), ("Zero3", FSDP2)]
# The limits, as multiples of the peer's bytes and time.
BYTES_HELD = {("Zero1", REDUNDANCY): 0.9, ("Zero3", FSDP2): 0.8}
TIME_HELD = {("Zero1", REDUNDANCY): 1.0, ("Zero1", LEAN): 1.0, ("Zero3", FSDP2): 1.0}


class Ours:
    """Wraps an engine of `refimpl.zero`. `step(tokens)` makes one training step."""

    def __init__(self, stage, model, comm):
        options = {"DataParallel": {}, "Zero3": {"look_ahead": LOOK_AHEAD}}  # DataParallel's default buckets are DDP's
        options = options.get(stage.__name__, {"bucket_bytes": BUCKET_BYTES})
        self.engine = stage(model, comm, functools.partial(torch.optim.AdamW, lr=LEARNING_RATE), **options)
        self.model, self.optimizer = model, self.engine.optimizer

    def step(self, tokens):
        self.engine.backward(self.engine.forward(tokens, tokens))
        self.engine.step()


class Theirs:
    """Wraps DDP or FSDP2, used as torch's documentation shows."""

    def __init__(self, name, model, comm):
        if name == FSDP2:
            for block in model.blocks:
                fully_shard(block)
            self.model = fully_shard(model)
        else:
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=name in (LEAN_DDP, LEAN))
        if name in (REDUNDANCY, LEAN):
            self.optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, tokens):
        self.model(tokens, tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


ENGINES = {**{stage.__name__: functools.partial(Ours, stage) for stage in (DataParallel, Zero1, Zero2, Zero3)},
           **{name: functools.partial(Theirs, name) for name in (DDP, LEAN_DDP, REDUNDANCY, LEAN, FSDP2)}}


def run(device="cpu", config=CONFIG, world=WORLD, rounds=15):
    """Measure bytes per parameter and seconds of a step of every engine: (settings, rows)."""
    gpus = torch.cuda.device_count() if torch.device(device).type == "cuda" else 0
    device = "cuda" if gpus >= world else "cpu"  # DDP and FSDP2 need NCCL for CUDA tensors
    settings = {"model": asdict(config), "parameters": config.parameter_count(), "dtype": "fp32", "ranks": world,
                "sequences of a rank": ROWS, "tokens on": device, "rounds": rounds, "bucket_bytes": BUCKET_BYTES,
                "look_ahead": LOOK_AHEAD, "optimizer": "AdamW",
                "peak": "bytes held before a third step and what it takes on top, without the tokens"}
    return settings, all_rows(device, config, world, rounds)


def all_rows(device, config, world, rounds):
    """Yield the rows of bytes pair by pair, then those of time."""
    yield from byte_rows(device, config, world)
    seconds = slowest(launch(seconds_of, world, config, rounds, device=device, timeout=900))
    yield from time_rows(Comparison(seconds), seconds)


def byte_rows(device, config, world):
    """Yield a row for each pair: the peak of a step beside the peer's, and the bytes held between two steps. Each
    engine is measured once, for its first pair."""
    held = {}
    for pair in tqdm(PAIRS, "bytes", delay=BAR_DELAY, leave=False):
        for name in pair:
            if name not in held:
                held[name] = bytes_held(name, device, config, world)
        ours, theirs = (held[name] for name in pair)
        yield row(f"peak of a step, {pair[0]}", pair[1], "B/parameter", ours["allocator"],
                  theirs["allocator"], bound=BYTES_HELD.get(pair), ours=ours, theirs=theirs)


def bytes_held(name, device, config, world):
    """Launch ranks with one engine; return what `bytes_of` read, per parameter, on the rank that takes most.

    RuntimeError if on a CPU the instruments differ by over 1 % on what is held: then one has missed something.
    """
    answers = launch(bytes_of, world, name, config, device=device, timeout=300)
    for rank in answers:
        if device == "cpu" and abs(rank["held"] - rank["resident"]) > 0.01 * rank["resident"]:
            raise RuntimeError(f"{name}: between two steps the allocator holds {rank['held']:,} bytes, the tracker "
                               f"{rank['resident']:,}: expected the same within 1 %")
    return {key: max(rank[key] for rank in answers) / config.parameter_count() for key in answers[0]}


def time_rows(timing, seconds):
    """Return rows of the median seconds of a step beside the peer's. `paired`: the median ratio within a round."""
    rows = []
    for name, peer in PAIRS:
        paired = statistics.median(ours / theirs for ours, theirs in zip(seconds[name], seconds[peer], strict=True))
        rows.append(row(f"step, {name}", peer, "s", timing.median(name), timing.median(peer), paired=paired,
                        bound=TIME_HELD.get((name, peer)), spread=timing.spread(name),
                        peer_spread=timing.spread(peer)))
    return rows


def slowest(ranks):
    """Merge the ranks' seconds to {engine: seconds of each round}: a step lasts until the last rank is done."""
    return {name: list(map(max, *(rank[name] for rank in ranks))) for name in ranks[0]}


# --- in a rank -------------------------------------------------------------------------------------------------------


def made(name, comm, config):
    """Make (engine, tokens) on the rank's device."""
    torch.manual_seed(0)
    engine = ENGINES[name](GPT(config, device=comm.device), comm)
    torch.manual_seed(comm.rank)
    return engine, torch.randint(0, config.vocab_size, (ROWS, config.context_length), device=comm.device)


def bytes_of(comm, name, config):
    """Return {instrument: peak of a step, "held" and "resident": between two steps, by each}, in bytes."""
    with memory.measure(comm.device) as before:
        engine, tokens = made(name, comm, config)
        for _ in range(2):
            engine.step(tokens)
        comm.barrier()  # until gloo's threads are idle: PyTorch's profiler may crash if it ends while one frees
    with memory.measure(comm.device) as step:
        engine.step(tokens)
        comm.barrier()
    with memory.track(engine.model, engine.optimizer) as t:
        engine.step(tokens)
    held, resident = before.net - tokens.nbytes, t.now.total - tokens.nbytes
    return {"allocator": held + step.peak, "tracker": t.peak.total - tokens.nbytes, "held": held, "resident": resident}


def seconds_of(comm, config, rounds):
    """Return {engine: seconds of each round}. The engines take turns, and every rank is at the same step."""
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
