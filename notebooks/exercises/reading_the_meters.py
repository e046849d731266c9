"""Exercises of the page *Reading the meters*."""

from collections import Counter

import torch

from refimpl import memory
from refimpl.data import TextData
from refimpl.model import GPT, GPTConfig

from . import exercise

HINTS = {
    "first": [
        "The list holds six losses. Each loss holds a graph, and the graph holds its batch's activations.",
        "Take the number out of each loss before the next batch: then nothing holds the graph.",
        "`loss.item()` is that number. Add the numbers up, and divide by `len(batches)`."],
    "second": [
        "A trace already sorts the bytes of its peak: look at `trace.top`, with `by=\"module\"`, its default.",
        "`trace.top(k)` returns [(module, bytes), ...], the largest first. One of the names is `(no module)`.",
        "Ask for more than one row, and return the first whose name is not `(no module)`."],
    "third": [
        "Fake tensors have shapes and no memory: `memory.dry_run` runs a function on them.",
        "`memory.dry_run(exercise.build_and_step, ...)` takes the function's arguments after the function.",
        "Its result has a `peak`, a Ledger. Compare `peak.total` with the budget: a peak equal to the budget fits."]}

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
    """Grade `validate(model, batches)`, which returns the mean loss, a number, with a peak that does not grow with the
    number of batches."""
    peaks = {}
    for count in (2, 6):
        model, batches = _model_and_batches(count)
        expected = leaking_validation(model, batches)
        with memory.track(model, batches) as t:
            said = validate(model, batches)
        peaks[count] = t.peak.total - t.start.total
        if not abs(said - expected) <= 1e-5:  # NaN is never <=
            return f"the mean loss of {count} batches is {expected:.7f}, you return {said:.7f}"
    grown = peaks[6] - peaks[2]
    return None if grown < 1024 else f"the mean is right, but 4 more batches raise the peak by {grown:,} bytes"


def _traced(heads, vocab_size, batch, sequence, aside=0):
    """Return the trace of a small model's forward and backward, beside a tensor of `aside` numbers of no module."""
    tokens = torch.zeros(batch, sequence, dtype=torch.int64)
    model = GPT(GPTConfig(vocab_size=vocab_size, context_length=64, layers=1, hidden=64, heads=heads))
    with memory.track(model) as trace:
        kept = torch.zeros(aside)
        model(tokens, tokens).backward()
        del kept
        torch.zeros(10)  # so the end is not the peak
    return trace


@exercise("a module and its bytes", (str, float))
def second(culprit):
    """Grade `culprit(trace)`, which returns (module, bytes) of the module with the largest share of the peak: what was
    made in it, its parameters and its gradients.
    """
    for case in ((2, 256, 4, 64), (16, 256, 4, 64), (2, 20_000, 4, 64), (2, 20_000, 1, 4), (2, 256, 1, 64, 10**6)):
        trace, made = _traced(*case), Counter()
        for storage in trace.held():  # at the peak
            made[storage.module] += storage.nbytes
        del made[""]
        (module, nbytes), = made.most_common(1)
        name, said = culprit(trace)
        if (name, said) != (module, nbytes):
            beside = f", beside a tensor of {case[4]:,} numbers that is in no module" if case[4:] else ""
            return (f"with {case[0]} heads, a vocabulary of {case[1]:,} and {case[2]} × {case[3]} tokens{beside}, "
                    f"it is {module} with {nbytes:,} bytes; you say {name} with {said:,}")
    return None


def build_and_step(config, batch, sequence):
    """Build a GPT and make one training step on `batch` sequences, as the page does."""
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, config.vocab_size, (batch, sequence))
    model(tokens, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


@exercise("the verdict and bytes", bool)
def third(fits):
    """Grade `fits(config, batch, sequence, budget)`, which tells whether `build_and_step` fits in `budget` bytes.

    It may take a hundredth of the step's bytes to find out, so it cannot run the step itself.
    """
    wide = GPTConfig(vocab_size=512, context_length=128, layers=1, hidden=128, heads=4)
    for config, batch, sequence in ((CONFIG, 1, 16), (CONFIG, 8, 128), (wide, 2, 64)):
        peak = memory.dry_run(build_and_step, config, batch, sequence).peak.total
        for budget in (peak, peak - 1):
            with memory.track() as t:
                said = fits(config, batch, sequence, budget)
            if said != (budget >= peak):
                return (f"{config.layers} layers of {config.hidden}, batch {batch}, sequence {sequence}: "
                        f"build_and_step peaks at {peak:,} bytes; for a budget of {budget:,} you say {said}")
            if t.peak.total > peak / 100:
                return (f"that is so, but to say it you took {t.peak.total:,} bytes: the step ran, and would have "
                        "failed where it does not fit")
    return None
