"""Context parallelism beside one process that has the whole sequence: bytes on a rank, seconds of a step.

Four ranks train a GPT on sequences of which each has a quarter, by a ring, over gathered keys, and by Ulysses. (torch's
own context parallelism does not run on a CPU, so the peer is the unsplit model.) For bytes, each runs alone in its own
ranks: what a step takes above what is held before it, on the rank that takes most, as the allocator alone reads it. For
time all take turns in the same ranks, and the unsplit model runs on rank 0 while the others wait. Their losses agree,
or the reading ends with an error.
"""

import statistics
import time

import torch
from tqdm import tqdm

from refimpl import memory
from refimpl.attention import flash_attention, flash_pair
from refimpl.comm import launch
from refimpl.context import SequenceParallelAttention, context_parallel
from refimpl.model import GPT, GPTConfig

from .record import row
from .runner import BAR_DELAY, Comparison, synchronize
from .zero import slowest

SIZES = {"vocab_size": 1024, "context_length": 1024, "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4,
         "positions": "rotary"}
WORLD, STEPS = 4, 3  # ranks, steps whose losses are compared
WHOLE = "the whole sequence on one device"
METHODS = {"ring, zig-zag": ("ring", "zig-zag"), "ring, plain": ("ring", "plain"),
           "gathered, zig-zag": ("gathered", "zig-zag"), "ulysses": ("ulysses", "plain")}
BYTES_HELD = 0.3  # of the peer's: a quarter of activations


class Trainer:
    """Trains a GPT on a rank's part of a sequence, or on all of it if `method` is WHOLE. `step()` returns the loss."""

    def __init__(self, method, comm, sizes):
        torch.manual_seed(0)
        self.comm, self.whole = comm, method == WHOLE
        self.model = GPT(GPTConfig(**sizes), flash_attention, device=comm.device)
        self.tokens = torch.randint(sizes["vocab_size"], (1, sizes["context_length"]),
                                    generator=torch.Generator().manual_seed(0)).to(comm.device)
        self.targets = self.tokens.roll(-1, 1)
        if not self.whole:
            kind, order = METHODS[method]
            attention = SequenceParallelAttention(comm, kind, order=order, attention=flash_pair if (
                kind == "ring") else None)
            context_parallel(self.model, attention)
            self.tokens, self.targets = attention.shard(self.tokens), attention.shard(self.targets)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self):
        """Run a step; return the mean loss of all tokens."""
        loss = self.model(self.tokens, self.targets) / (1 if self.whole else self.comm.world_size)
        loss.backward()
        if not self.whole:
            loss = self.comm.all_reduce(loss.detach())
            for p in self.model.parameters():
                self.comm.all_reduce(p.grad, out=p.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def run(device="cpu", sizes=SIZES, world=WORLD, rounds=7):
    """Measure the peak and the seconds of a step of each: (settings, rows)."""
    gpus = torch.cuda.device_count() if torch.device(device).type == "cuda" else 0
    device = "cuda" if gpus >= world else "cpu"
    config = GPTConfig(**sizes)
    settings = {"model": sizes, "parameters": config.parameter_count(), "dtype": "fp32", "ranks": world,
                "tokens on": device, "rounds": rounds, "optimizer": "SGD"}
    return settings, all_rows(device, sizes, world, rounds)


def all_rows(device, sizes, world, rounds):
    """Yield the rows of bytes, then those of time. RuntimeError if losses differ."""
    whole, = launch(bytes_of, 1, WHOLE, sizes, device=device, timeout=300)
    for method in tqdm(METHODS, "bytes", delay=BAR_DELAY, leave=False):
        ranks = launch(bytes_of, world, method, sizes, device=device, timeout=300)
        if max(abs(a / b - 1) for a, b in zip(ranks[0]["losses"], whole["losses"], strict=True)) > 1e-4:
            raise RuntimeError(f"{method} has losses {ranks[0]['losses']}, {WHOLE} {whole['losses']}: expected the "
                               "same to 1e-4")
        yield row(f"peak of a step, {method}", WHOLE, "MB", max(rank["peak"] for rank in ranks) / 1e6,
                  whole["peak"] / 1e6, bound=BYTES_HELD)
    seconds = slowest(launch(seconds_of, world, sizes, rounds, device=device, timeout=900))
    timing = Comparison(seconds)
    for method in METHODS:
        paired = statistics.median(a / b for a, b in zip(seconds[method], seconds[WHOLE], strict=True))
        yield row(f"step, {method}", WHOLE, "s", timing.median(method), timing.median(WHOLE), paired=paired,
                  spread=timing.spread(method), peer_spread=timing.spread(WHOLE))


# --- in a rank -------------------------------------------------------------------------------------------------------


def bytes_of(comm, method, sizes):
    """Return {"peak": bytes that a step takes, "losses": of the first steps}."""
    torch.set_num_threads(1)
    trainer = Trainer(method, comm, sizes)
    losses = [trainer.step() for _ in range(STEPS)]
    comm.barrier()  # until gloo's threads are idle
    with memory.measure(comm.device) as step:
        trainer.step()
        comm.barrier()
    return {"peak": step.peak, "losses": losses}


def seconds_of(comm, sizes, rounds):
    """Return {method: seconds of each round}. All take turns, and every rank is at the same step."""
    torch.set_num_threads(1)
    trainers = {method: Trainer(method, comm, sizes) for method in (WHOLE, *METHODS)}
    seconds = {method: [] for method in trainers}
    for turn in range(rounds + 1):
        for method, trainer in trainers.items():
            comm.barrier()
            start = time.perf_counter()
            if method != WHOLE or comm.rank == 0:
                trainer.step()
            synchronize()
            if turn:
                seconds[method].append(time.perf_counter() - start)
    return seconds
