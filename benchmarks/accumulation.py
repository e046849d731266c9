"""Steps in micro-batches, beside the whole batch at once and beside a loop written by hand.

There are two questions. With a constant effective batch, how many bytes do micro-batches save, and what do they cost in
time? What does `refimpl.accumulation.accumulate` cost beside a plain loop, whose gradient is right only if all
micro-batches have equally many targets?
"""

from dataclasses import asdict, replace
from functools import partial

from tqdm import tqdm

from refimpl import memory
from refimpl.accumulation import accumulate, accumulation_bytes

from .meter import DTYPES, TrainingStep, settings_of, size_of
from .record import row
from .runner import BAR_DELAY, compare, peak

ROWS, PARTS = 16, (1, 2, 4, 8, 16)  # the effective batch, and the numbers of micro-batches
OURS, PLAIN, WHOLE = "refimpl.accumulation", "a plain loop", "the whole batch at once"


class Steps(TrainingStep):
    """Makes the same step on ROWS sequences in three ways: `ours`, `plain`, and by a call at once."""

    def __init__(self, size, dtype, device):
        super().__init__(replace(size, batch=ROWS), dtype, device=device)

    def ours(self, parts):
        """Make a step with `accumulate`."""
        accumulate(self.model, self.tokens, self.tokens, micro_batch=ROWS // parts)
        self.update()

    def plain(self, parts):
        """Make a step as most scripts do: divide each mean by the number of micro-batches, and sum in `.grad`."""
        for part in self.tokens.split(ROWS // parts):
            (self.model(part, part) / parts).backward()
        self.update()


def run(device="cpu", size=None, rounds=9):
    """Make all comparisons on `device`: (settings, rows). `size` replaces the device's realistic one."""
    size = size_of(device, size)
    settings = settings_of(size, rounds, optimizer="AdamW") | {"step": {**asdict(size), "batch": ROWS},
                                                               "micro-batches": list(PARTS)}
    return settings, all_rows(size, device, rounds)


def all_rows(size, device, rounds):
    """Yield the rows of bytes, then those of time, precision by precision."""
    for name, dtype in tqdm(DTYPES.items(), "precisions", delay=BAR_DELAY, leave=False):
        steps = Steps(size, dtype, device)
        steps()
        yield from byte_rows(steps, name, dtype, device)
        yield from time_rows(steps, name, rounds)


def byte_rows(steps, name, dtype, device):
    """Yield peaks above the start of a step, for each number of micro-batches two rows: ours beside the whole batch's,
    and beside the plain loop's."""
    whole = peak(steps, device)
    for parts in PARTS[1:]:
        ours, plain = (peak(partial(step, parts), device) for step in (steps.ours, steps.plain))
        held = accumulation_bytes(steps.config.parameter_count(), memory.activation_bytes(
            steps.config, ROWS // parts, steps.tokens.shape[1], dtype, device), parts, gradient=dtype)
        what = f"peak above the start, {parts} micro-batches, {name}"
        yield row(what, WHOLE, "bytes", ours, whole, predicted=held.total)
        yield row(what, PLAIN, "bytes", ours, plain)


def time_rows(steps, name, rounds):
    """Yield seconds of a step, for each number of micro-batches two rows, in alternation."""
    for parts in PARTS:
        timing = compare({OURS: partial(steps.ours, parts), PLAIN: partial(steps.plain, parts), WHOLE: steps},
                         rounds=rounds, title=f"{parts} micro-batches, {name}")
        for peer in (WHOLE, PLAIN):
            yield timing.row(f"step in {parts} micro-batch{'es' * (parts > 1)}, {name}", OURS, peer)
