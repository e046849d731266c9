"""Exercises of the page *Reading the meters*."""

import torch

from refimpl import memory
from refimpl.data import TextData
from refimpl.memory.top import module_of
from refimpl.model import GPT, GPTConfig

from . import exercise

CONFIG = GPTConfig(vocab_size=256, context_length=128, layers=2, hidden=64, heads=4)


def leaking_validation(model, batches):
    """Return the mean loss over `batches`. Leaks on purpose: every loss in the list holds its batch's activations."""
    losses = [model(tokens, targets) for tokens, targets in batches]
    return (sum(losses) / len(losses)).item()


def _model_and_batches(count=6):
    torch.manual_seed(0)
    batches = list(TextData().batches(2, 64, split="validation"))[:count]
    return GPT(CONFIG), batches


@exercise("parity and bytes", float)
def first(validate):
    """Grade `validate(model, batches)`, which returns the mean loss, a float, with a peak that does not grow with the
    number of batches."""
    expected = leaking_validation(*_model_and_batches())
    peaks = {}
    for count in (2, 6):
        model, batches = _model_and_batches(count)
        with memory.track(model, batches) as t:
            said = validate(model, batches)
        peaks[count] = t.peak.total - t.start.total
    if not isinstance(said, float) or not abs(said - expected) <= 1e-5:  # NaN is never <=
        return f"the mean loss is the float {expected:.5f}, you return {said!r}"
    grown = peaks[6] - peaks[2]
    return None if grown < 1024 else f"the mean is right, but 4 more batches raise the peak by {grown:,} bytes"


@exercise("parity and bytes", (str, int))
def second(culprit):
    """Grade `culprit(trace)`, which returns (module, bytes) of the module with the largest share of the peak: what was
    made in it, its parameters and its gradients.
    """
    for heads, vocab_size, batch in ((2, 256, 4), (16, 256, 4), (2, 20_000, 4), (2, 256, 1)):
        config = GPTConfig(vocab_size=vocab_size, context_length=64, layers=1, hidden=64, heads=heads)
        tokens = torch.randint(0, 256, (batch, 64))
        model = GPT(config)
        with memory.track(model) as trace:
            model(tokens, tokens).backward()
        row, made = trace.peak_moment().index, {}
        for index, i, delta in trace.events:
            module = module_of(trace.records[i])
            if index < row and module:
                made[module] = made.get(module, 0) + delta
        largest = max(made, key=made.get)
        said = culprit(trace)
        if said != (largest, made[largest]):
            return (f"with {heads} heads and a vocabulary of {vocab_size} it is {largest} with "
                    f"{made[largest]:,} bytes, you say {said}")
    return None


def build_and_step(config, batch, sequence):
    """Build a GPT and make one training step on `batch` sequences, as the page does."""
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, config.vocab_size, (batch, sequence))
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


@exercise("parity and bytes", bool)
def third(fits):
    """Grade `fits(config, batch, sequence, budget)`, which tells whether `build_and_step` fits in `budget` bytes.

    It may take a hundredth of the step's bytes to find out, so it cannot run the step itself.
    """
    for batch, sequence in ((1, 16), (8, 128)):
        peak = memory.dry_run(build_and_step, CONFIG, batch, sequence).peak.total
        for budget in (peak, peak - 1):
            with memory.track() as t:
                said = fits(CONFIG, batch, sequence, budget)
            if said != (budget >= peak):
                return (f"batch {batch}, sequence {sequence}: build_and_step peaks at {peak:,} bytes; for a "
                        f"budget of {budget:,} you say {said}")
            if t.peak.total > peak / 100:
                return (f"that is so, but to say it you took {t.peak.total:,} bytes: the step ran, and would have "
                        "failed where it does not fit")
    return None
