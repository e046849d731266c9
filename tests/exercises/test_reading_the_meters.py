"""Right answers pass, wrong and unanswered ones do not."""

import math
import re

import torch
from exercises_kit import Answers, graded

from exercises import reading_the_meters as page
from refimpl import memory
from refimpl.model import GPT


def validate(model, batches):
    return sum(model(tokens, targets).item() for tokens, targets in batches) / len(batches)


def culprit(trace):
    return next((module, nbytes) for module, nbytes in trace.top(10) if module != "(no module)")


def fits(config, batch, sequence, budget):
    def step():
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters())
        tokens = torch.zeros(batch, sequence, dtype=torch.int64)
        model(tokens, tokens).backward()
        optimizer.step()

    return memory.dry_run(step).peak.total <= budget


def fits_for_real(config, batch, sequence, budget):
    with memory.track() as t:
        page.build_and_step(config, batch, sequence)
    return t.peak.total <= budget


def fits_of_one_sequence(config, batch, sequence, budget):
    return memory.dry_run(page.build_and_step, config, 1, sequence).peak.total <= budget


def second_largest(trace):
    return [row for row in trace.top(3) if row[0] != "(no module)"][1]


ANSWERS = {
    page.first: Answers(
        right=[validate],
        wrong=[
            (lambda model, batches: math.nan, re.compile("the mean loss is the float [0-9.]*, you return nan")),
            (lambda model, batches: torch.tensor(validate(model, batches)), "you return tensor"),
            (lambda model, batches: validate(model, batches[:-1]), "the mean loss is"),
            (page.leaking_validation, "4 more batches raise the peak"),
            (lambda model, batches: 5.0, "the mean loss is")],
    ),
    page.second: Answers(
        right=[culprit],
        wrong=[
            (lambda trace: (culprit(trace)[0], math.nan), re.compile("you say .*nan")),
            (lambda trace: math.nan, "you say nan"),
            (lambda trace: (culprit(trace)[0], culprit(trace)[1] - 4), "you say"),
            (second_largest, "you say"),
            (lambda trace: ("GPT", 1), "you say")],
    ),
    page.third: Answers(
        right=[fits],
        wrong=[
            (lambda *args: math.nan, "you say nan"),
            (fits_of_one_sequence, "batch 8, sequence 128: build_and_step peaks at"),
            (lambda *args: not fits(*args), "build_and_step peaks at"),
            (fits_for_real, re.compile("that is so, but to say it you took [0-9,]* bytes: the step ran")),
            (lambda *args: True, "build_and_step peaks at"),
            (lambda *args: False, "build_and_step peaks at")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
