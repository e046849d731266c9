"""A long sequence in chunks beside the same sequence whole: the peak of a step and the time it takes."""

from dataclasses import replace
from functools import partial

from tqdm import tqdm

from refimpl.sequence_length import ChunkedSequenceProcessor, chunked_step_bytes

from .meter import DTYPES, TrainingStep, settings_of, size_of
from .record import row
from .runner import BAR_DELAY, compare, peak

LONGER, CHUNKS = 8, (2, 4, 8, 16)  # the sequence, in multiples of the usual one, and the numbers of chunks
WHOLE = "the whole sequence at once"


class Steps(TrainingStep):
    """Makes forward and backward: gradients exist, and are added to."""

    def __call__(self):
        self.model(self.tokens, self.tokens).backward()

    def in_chunks(self, chunks, gradient="full"):
        """Make the same step in chunks."""
        length = self.tokens.shape[1] // chunks
        ChunkedSequenceProcessor(self.model, length, gradient=gradient)(self.tokens, self.tokens).backward()


def run(device="cpu", size=None, rounds=11):
    """Make all comparisons on `device`: (settings, rows). `size` replaces the device's realistic one, made longer."""
    usual = size_of(device)
    size = size or replace(usual, batch=1, sequence=LONGER * usual.sequence)
    settings = settings_of(size, rounds, chunks=list(CHUNKS), attention="softmax_attention") | {
        "a step": "forward and backward; gradients are there and added to"}
    return settings, all_rows(size, device, rounds)


def all_rows(size, device, rounds):
    """Yield the rows of bytes, then those of time, precision by precision."""
    for name, dtype in tqdm(DTYPES.items(), "precisions", delay=BAR_DELAY, leave=False):
        steps = Steps(size, dtype, device=device)
        steps()
        yield from byte_rows(steps, name, dtype, device)
        yield from time_rows(steps, name, rounds)


def byte_rows(steps, name, dtype, device):
    """Yield a row for each number of chunks: the peak above the start of a step that starts with gradients None."""
    whole = without_gradients(steps, steps, device)
    batch, length = steps.tokens.shape
    for chunks in CHUNKS:
        ours = without_gradients(steps, partial(steps.in_chunks, chunks), device)
        ledger = chunked_step_bytes(steps.config, batch, length, length // chunks, dtype, "sgd", device)
        predicted = ledger.total - ledger["parameters"] - ledger["buffers"] - ledger["inputs"]
        yield row(f"peak above the start, {chunks} chunks, {name}", WHOLE, "bytes", ours, whole, predicted=predicted)


def without_gradients(steps, step, device):
    """Return the peak in bytes of a step that begins without gradients."""
    steps.model.zero_grad()
    return peak(step, device)


def time_rows(steps, name, rounds):
    """Return rows of the seconds of a step in chunks, beside the whole sequence, in alternation."""
    kinds = {f"step in {chunks} chunks, {name}": partial(steps.in_chunks, chunks) for chunks in CHUNKS}
    kinds[f"step in {CHUNKS[1]} chunks, truncated, {name}"] = partial(steps.in_chunks, CHUNKS[1], "truncated")
    timing = compare({**kinds, WHOLE: steps}, rounds=rounds, title=f"chunks, {name}")
    return [timing.row(what, what, WHOLE) for what in kinds]
