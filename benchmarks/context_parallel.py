"""Context parallelism beside one process that has the whole sequence: bytes on a rank, seconds of a step.

Four ranks train a GPT on sequences of which each has a quarter, by a ring, over gathered keys, and by Ulysses. (torch's
own context parallelism does not run on a CPU, so the peer is the unsplit model.) For bytes, each runs alone in its own
ranks: what a step takes above what is held before it, on the rank that takes most, as the allocator alone reads it. For
time all take turns in the same ranks, and the unsplit model runs on rank 0 while the others wait. Their losses agree,
or the reading ends with an error.
"""

import torch
from tqdm import tqdm

from refimpl.attention import flash_attention, flash_pair
from refimpl.comm import launch
from refimpl.context import SequenceParallelAttention, context_parallel
from refimpl.model import GPT, GPTConfig

from .ranks import bytes_alone, check_losses, place_of, seconds_of, slowest
from .record import row
from .runner import BAR_DELAY, Comparison

SIZES = {"vocab_size": 1024, "context_length": 1024, "layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4,
         "positions": "rotary"}
WORLD, STEPS = 4, 3  # ranks, steps whose losses are compared
WHOLE = "the whole sequence on one device"
METHODS = {"ring, zig-zag": ("ring", "zig-zag"), "ring, plain": ("ring", "plain"),
           "gathered, zig-zag": ("gathered", "zig-zag"), "ulysses": ("ulysses", "plain")}
BYTES_HELD = 0.3  # of the peer's: a quarter of activations


class Trainer:
    """Trains a GPT on a rank's part of a sequence, or on all of it, on rank 0 alone, if `method` is WHOLE."""

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

    def step(self, tokens=None):
        """Run a step on its own tokens; return the mean loss of all tokens."""
        if self.whole and self.comm.rank:
            return 0.0
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
    device = place_of(world, device)
    config = GPTConfig(**sizes)
    settings = {"model": sizes, "parameters": config.parameter_count(), "dtype": "fp32", "ranks": world,
                "tokens on": device, "rounds": rounds, "optimizer": "SGD"}
    return settings, all_rows(device, sizes, world, rounds)


def all_rows(device, sizes, world, rounds):
    """Yield the rows of bytes, then those of time. RuntimeError if losses differ."""
    whole, = launch(bytes_of, 1, WHOLE, sizes, device=device, timeout=300)
    for method in tqdm(METHODS, "bytes", delay=BAR_DELAY, leave=False):
        ranks = launch(bytes_of, world, method, sizes, device=device, timeout=300)
        check_losses(method, ranks[0]["losses"], WHOLE, whole["losses"])
        yield row(f"peak of a step, {method}", WHOLE, "MB", max(rank["peak"] for rank in ranks) / 1e6,
                  whole["peak"] / 1e6, bound=BYTES_HELD)
    timing = Comparison(slowest(launch(times_of, world, sizes, rounds, device=device, timeout=900)))
    for method in METHODS:
        yield timing.row(f"step, {method}", method, WHOLE, paired=timing.paired(method, WHOLE))


# --- in a rank -------------------------------------------------------------------------------------------------------


def made(method, comm, sizes):
    """Make (trainer, tokens)."""
    torch.set_num_threads(1)
    trainer = Trainer(method, comm, sizes)
    return trainer, trainer.tokens


def bytes_of(comm, method, sizes):
    """Return {"peak": bytes that a step takes, "losses": of the first steps}."""
    read = bytes_alone(comm, made, STEPS, method, comm, sizes)
    return {"peak": read["taken"], "losses": read["losses"]}


def times_of(comm, sizes, rounds):
    """Return {method: seconds of each round}. The unsplit model runs on rank 0 while the others wait."""
    return seconds_of(comm, {method: made(method, comm, sizes)[0].step for method in (WHOLE, *METHODS)}, rounds)
