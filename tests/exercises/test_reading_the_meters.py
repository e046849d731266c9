"""Right answers pass, wrong and unanswered ones do not."""

import math
import re
from collections import Counter
from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import reading_the_meters as page
from refimpl import memory
from refimpl.model import GPT

# --- first -----------------------------------------------------------------------------------------------------------


def validate(model, batches):
    return sum(model(tokens, targets).item() for tokens, targets in batches) / len(batches)


def without_graphs(model, batches):
    with torch.no_grad():
        return torch.stack([model(*batch) for batch in batches]).mean().item()


def detached(model, batches):
    total = torch.zeros(())
    for tokens, targets in batches:
        total += model(tokens, targets).detach()
    return float(total) / len(batches)


def summed_graphs(model, batches):
    total = 0.0
    for tokens, targets in batches:
        total = total + model(tokens, targets)
    return total.item() / len(batches)


def in_one_batch(model, batches):
    with torch.no_grad():
        return model(*(torch.cat(parts) for parts in zip(*batches, strict=True))).item()


def perplexity(model, batches):
    return math.exp(validate(model, batches))


# --- second ----------------------------------------------------------------------------------------------------------


def culprit(trace):
    return next(row for row in trace.top(2) if row[0] != "(no module)")


def from_storages(trace):
    sums = Counter()
    for storage in trace.held():
        if storage.module:
            sums[storage.module] += storage.nbytes
    return max(sums.items(), key=lambda item: item[1])


def from_all_rows(trace):
    rows = {module: nbytes for module, nbytes in trace.top(10_000, by="module") if not module.startswith("(")}
    largest = max(rows, key=rows.get)
    return [largest, rows[largest]]


def largest_tensor(trace):
    storage = trace.held()[0]
    return storage.module, storage.nbytes


def of_all_that_was_made(trace):
    made = Counter()
    for _, i, delta in trace.events:
        if delta > 0 and trace.records[i].module:
            made[trace.records[i].module] += delta
    return made.most_common(1)[0]


# --- third -----------------------------------------------------------------------------------------------------------


def fits(config, batch, sequence, budget):
    return memory.dry_run(page.build_and_step, config, batch, sequence).peak.total <= budget


def with_a_step_of_its_own(config, batch, sequence, budget, *, optimizer=torch.optim.AdamW, step=True):
    def one_step():
        model = GPT(config)
        adam = optimizer(model.parameters())
        tokens = torch.zeros(batch, sequence, dtype=torch.int64)
        model(tokens, tokens).backward()
        if step:
            adam.step()

    return memory.dry_run(one_step).peak.total <= budget


def by_its_timeline(config, batch, sequence, budget):
    moments = memory.dry_run(lambda: page.build_and_step(config, batch, sequence)).timeline
    return all(moment.ledger.total <= budget for moment in moments)


def at_its_end(config, batch, sequence, budget):
    return memory.dry_run(page.build_and_step, config, batch, sequence).now.total <= budget


def fits_for_real(config, batch, sequence, budget):
    with memory.track() as t:
        page.build_and_step(config, batch, sequence)
    return t.peak.total <= budget


def by_arithmetic(config, batch, sequence, budget):
    states = memory.model_state_bytes(config.parameter_count(), "adamw", "fp32")
    return states.total + memory.activation_bytes(config, batch, sequence) <= budget


ANSWERS = {
    page.first: Answers(
        right=[validate, without_graphs, detached],
        wrong=[
            (lambda model, batches: math.nan, re.compile("the mean loss of 2 batches is [0-9.]*, you return nan")),
            (lambda model, batches: torch.tensor(validate(model, batches)), "(Tensor): `.item()` takes the number out"),
            (lambda model, batches: validate(model, batches[:-1]), "the mean loss of 2 batches is"),
            (lambda model, batches: validate(model, batches[:2]), "the mean loss of 6 batches is"),
            (lambda model, batches: validate(model, batches) * len(batches), "the mean loss of 2 batches is"),
            (lambda model, batches: model(*batches[-1]).item(), "the mean loss of 2 batches is"),
            (lambda model, batches: round(validate(model, batches), 3), "the mean loss of 2 batches is"),
            (perplexity, "the mean loss of 2 batches is"),
            (lambda model, batches: validate(model, batches) / math.log(2), "the mean loss of 2 batches is"),
            (lambda model, batches: validate(*page._model_and_batches(2)), "the mean loss of 6 batches is"),
            (summed_graphs, "the mean is right, but 4 more batches raise the peak"),
            (in_one_batch, "the mean is right, but 4 more batches raise the peak")],
        saves_nothing=(page.leaking_validation, "the mean is right, but 4 more batches raise the peak"),
    ),
    page.second: Answers(
        right=[culprit, from_storages, from_all_rows],
        wrong=[
            (lambda trace: (culprit(trace)[0], math.nan), "you say GPT with nan"),
            (lambda trace: math.nan, "expected 2 values (a text, a number), you return nan"),
            (lambda trace: culprit(trace)[::-1], "expected a text, you return 852484"),
            (lambda trace: trace.top(1), "expected 2 values (a text, a number)"),
            (lambda trace: trace.top(1)[0], "it is GPT with 213,508 bytes; you say (no module) with 4,000,516"),
            (lambda trace: (culprit(trace)[0], culprit(trace)[1] - 4), "it is GPT with 852,484 bytes; you say"),
            (lambda trace: (culprit(trace)[0], trace.peak.total), "it is GPT with 852,484 bytes; you say"),
            (lambda trace: [row for row in trace.top(3) if row[0] != "(no module)"][1], "you say blocks.0.attention"),
            (lambda trace: trace.top(1, category="activations")[0], "you say blocks.0.attention with"),
            (lambda trace: trace.top(1, phase="forward")[0], "you say blocks.0.attention with"),
            (lambda trace: trace.top(1, by="operation")[0], "with 2 heads, a vocabulary of 256 and 4 × 64 tokens, it"),
            (lambda trace: ("GPT", culprit(trace)[1]), "with 16 heads, a vocabulary of 256 and 4 × 64 tokens, it is"),
            (largest_tensor, "it is GPT with 852,484 bytes; you say"),
            (of_all_that_was_made, "it is GPT with 852,484 bytes; you say")],
        same=("2 → 3",),  # rows that it asks for: two are enough
    ),
    page.third: Answers(
        right=[fits, with_a_step_of_its_own, by_its_timeline],
        wrong=[
            (lambda *args: math.nan, "expected True or False, you return nan"),
            (lambda config, batch, *rest: fits(config, 1, *rest), "batch 8, sequence 128: build_and_step peaks at"),
            (lambda *args: fits(page.CONFIG, *args[1:]), "1 layers of 128, batch 2, sequence 64: build_and_step peaks"),
            (lambda *args: not fits(*args), "batch 1, sequence 16: build_and_step peaks at"),
            (lambda *args: fits(*args[:3], args[3] - 1), "batch 1, sequence 16: build_and_step peaks at"),
            (lambda *args: fits(*args[:3], args[3] + 1), "batch 1, sequence 16: build_and_step peaks at"),
            (lambda config, batch, sequence, budget: memory.dry_run(page.build_and_step, config, batch, sequence).peak,
             "expected True or False, you return"),
            (partial(with_a_step_of_its_own, step=False), "batch 1, sequence 16: build_and_step peaks at"),
            (partial(with_a_step_of_its_own, optimizer=torch.optim.SGD), "batch 1, sequence 16: build_and_step peaks"),
            (at_its_end, "batch 1, sequence 16: build_and_step peaks at"),
            (by_arithmetic, "build_and_step peaks at"),
            (fits_for_real, re.compile("that is so, but to say it you took [0-9,]* bytes: the step ran")),
            (lambda *args: True, "build_and_step peaks at"),
            (lambda *args: False, "build_and_step peaks at")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
