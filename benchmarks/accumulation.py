"""Steps in micro-batches, beside the whole batch at once and beside a loop written by hand.

There are two questions. With a constant effective batch, how many bytes do micro-batches save, and what do they cost in
time? What does `refimpl.accumulation.accumulate` cost beside a plain loop, whose gradient is right only if all
micro-batches have equally many targets?
"""

from dataclasses import asdict

import torch
from tqdm import tqdm

from refimpl import memory
from refimpl.accumulation import accumulate, accumulation_bytes
from refimpl.model import GPT, GPTConfig

from .meter import DTYPES, REALISTIC
from .record import row
from .runner import BAR_DELAY, compare

ROWS, PARTS = 16, (1, 2, 4, 8, 16)  # the effective batch, and the numbers of micro-batches
OURS, PLAIN, WHOLE = "refimpl.accumulation", "a plain loop", "the whole batch at once"


class Steps:
    """Holds a GPT, its AdamW and a batch. `ours`, `plain` and `whole` make the same step in three ways."""

    def __init__(self, size, dtype, device):
        self.config = GPTConfig(vocab_size=size.vocab_size, context_length=size.sequence, layers=size.layers,
                                hidden=size.hidden, heads=size.heads)
        self.model = GPT(self.config, dtype=dtype, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, size.vocab_size, (ROWS, size.sequence), device=device)

    def ours(self, parts):
        """Make a step with `accumulate`."""
        accumulate(self.model, self.tokens, self.tokens, micro_batch=ROWS // parts)
        self._step()

    def plain(self, parts):
        """Make a step as most scripts do: divide each mean by the number of micro-batches, and sum in `.grad`."""
        for part in self.tokens.split(ROWS // parts):
            (self.model(part, part) / parts).backward()
        self._step()

    def whole(self):
        """Make a step with one forward and one backward."""
        self.model(self.tokens, self.tokens).backward()
        self._step()

    def _step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(device="cpu", size=None, rounds=9):
    """Make all comparisons on `device`: (settings, rows). `size` replaces the device's realistic one."""
    size = size or REALISTIC[torch.device(device).type]
    settings = {"step": {**asdict(size), "batch": ROWS}, "optimizer": "AdamW", "rounds": rounds,
                "threads": torch.get_num_threads(), "micro-batches": list(PARTS)}
    return settings, all_rows(size, device, rounds)


def all_rows(size, device, rounds):
    """Yield the rows of bytes, then those of time, precision by precision."""
    for name, dtype in tqdm(DTYPES.items(), "precisions", delay=BAR_DELAY, leave=False):
        steps = Steps(size, dtype, device)
        steps.whole()
        yield from byte_rows(steps, name, dtype, device)
        yield from time_rows(steps, name, rounds)


def byte_rows(steps, name, dtype, device):
    """Yield peaks above the start of a step by the allocator, for each number of micro-batches two rows: ours beside
    the whole batch's, and beside the plain loop's."""
    whole = peak(steps.whole, device)
    for parts in PARTS[1:]:
        ours, plain = (peak(lambda step=step, parts=parts: step(parts), device) for step in (steps.ours, steps.plain))
        held = accumulation_bytes(steps.config.parameter_count(), memory.activation_bytes(
            steps.config, ROWS // parts, steps.tokens.shape[1], dtype, device), parts, gradient=dtype)
        case = f"{parts} micro-batches, {name}"
        yield row(f"peak above the start, {case}", WHOLE, "bytes", ours, whole, predicted=held.total)
        yield row(f"peak above the start, {case}", PLAIN, "bytes", ours, plain)


def peak(step, device):
    """Return the peak in bytes above the start, as requested from the allocator."""
    with memory.measure(device) as m:
        step()
    return m.peak


def time_rows(steps, name, rounds):
    """Yield median seconds of a step, for each number of micro-batches two rows: ours beside the whole batch's, and
    beside the plain loop's, in alternation."""
    for parts in PARTS:
        timing = compare({OURS: lambda parts=parts: steps.ours(parts), PLAIN: lambda parts=parts: steps.plain(parts),
                          WHOLE: steps.whole}, rounds=rounds, title=f"{parts} micro-batches, {name}")
        for peer in (WHOLE, PLAIN):
            yield row(f"step in {parts} micro-batch{'es' * (parts > 1)}, {name}", peer, "s", timing.median(OURS),
                      timing.median(peer), spread=timing.spread(OURS), peer_spread=timing.spread(peer))
