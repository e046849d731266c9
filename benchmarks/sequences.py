"""A long sequence in chunks beside the same sequence whole: the peak of a step and the time it takes."""

from dataclasses import asdict, replace

import torch
from tqdm import tqdm

from refimpl import memory
from refimpl.model import GPT, GPTConfig
from refimpl.sequence_length import ChunkedSequenceProcessor, chunked_step_bytes

from .meter import DTYPES, REALISTIC
from .record import row
from .runner import BAR_DELAY, compare

LONGER, CHUNKS = 8, (2, 4, 8, 16)  # the sequence, in multiples of the usual one, and the numbers of chunks
WHOLE = "the whole sequence at once"


class Steps:
    """Holds a GPT and a sequence. Gradients exist, and steps add to them."""

    def __init__(self, size, dtype, device):
        self.config = GPTConfig(vocab_size=size.vocab_size, context_length=size.sequence, layers=size.layers,
                                hidden=size.hidden, heads=size.heads)
        self.model = GPT(self.config, dtype=dtype, device=device)
        self.tokens = torch.randint(0, size.vocab_size, (size.batch, size.sequence), device=device)

    def whole(self):
        """Make a step with one forward and one backward."""
        self.model(self.tokens, self.tokens).backward()

    def in_chunks(self, chunks, gradient="full"):
        """Make the same step in chunks."""
        length = self.tokens.shape[1] // chunks
        ChunkedSequenceProcessor(self.model, length, gradient=gradient)(self.tokens, self.tokens).backward()


def run(device="cpu", size=None, rounds=11):
    """Make all comparisons on `device`: (settings, rows). `size` replaces the device's realistic one, made longer."""
    if size is None:
        usual = REALISTIC[torch.device(device).type]
        size = replace(usual, batch=1, sequence=LONGER * usual.sequence)
    settings = {"step": asdict(size), "rounds": rounds, "threads": torch.get_num_threads(), "chunks": list(CHUNKS),
                "attention": "softmax_attention", "a step": "forward and backward; gradients are there and added to"}
    return settings, all_rows(size, device, rounds)


def all_rows(size, device, rounds):
    """Yield the rows of bytes, then those of time, precision by precision."""
    for name, dtype in tqdm(DTYPES.items(), "precisions", delay=BAR_DELAY, leave=False):
        steps = Steps(size, dtype, device)
        steps.whole()
        yield from byte_rows(steps, name, dtype, device)
        yield from time_rows(steps, name, rounds)


def byte_rows(steps, name, dtype, device):
    """Yield a row for each number of chunks: the allocator's peak above the start of a step that starts with gradients
    None."""
    whole = peak(steps, steps.whole, device)
    batch, length = steps.tokens.shape
    for chunks in CHUNKS:
        ours = peak(steps, lambda chunks=chunks: steps.in_chunks(chunks), device)
        ledger = chunked_step_bytes(steps.config, batch, length, length // chunks, dtype, "sgd", device)
        predicted = ledger.total - ledger["parameters"] - ledger["buffers"] - ledger["inputs"]
        yield row(f"peak above the start, {chunks} chunks, {name}", WHOLE, "bytes", ours, whole, predicted=predicted)


def peak(steps, step, device):
    """Return the peak in bytes above the start, as requested from the allocator."""
    steps.model.zero_grad()
    with memory.measure(device) as m:
        step()
    return m.peak


def time_rows(steps, name, rounds):
    """Return rows of the median seconds of a step in chunks, beside the whole sequence, in alternation."""
    kinds = {f"step in {chunks} chunks, {name}": lambda chunks=chunks: steps.in_chunks(chunks) for chunks in CHUNKS}
    kinds[f"step in {CHUNKS[1]} chunks, truncated, {name}"] = lambda: steps.in_chunks(CHUNKS[1], "truncated")
    timing = compare({**kinds, WHOLE: steps.whole}, rounds=rounds, title=f"chunks, {name}")
    return [row(what, WHOLE, "s", timing.median(what), timing.median(WHOLE), spread=timing.spread(what),
                peer_spread=timing.spread(WHOLE)) for what in kinds]
