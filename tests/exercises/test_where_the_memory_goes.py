"""Right answers pass, wrong and unanswered ones do not."""

import math
import re
from functools import partial

import pytest
import torch
from exercises_kit import Answers, graded

from exercises import where_the_memory_goes as page
from refimpl.memory import model_state_bytes
from refimpl.model import GPT


def states(config):
    tensors = len(list(GPT(config).parameters()))
    return model_state_bytes(config.parameter_count(), "adamw", tensors=tensors).total


def evaluate(model, tokens, targets):
    with torch.no_grad():
        return model(tokens, targets)


def lean_step(model, optimizer, tokens, targets, *, zeros_stay=False):
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=not zeros_stay)
    return loss.detach()


def step_to_nan(model, optimizer, tokens, targets):
    loss = lean_step(model, optimizer, tokens, targets)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(math.nan)
    return loss


class SpoilsTheWeights:
    """The second step's loss is right; then one weight is not."""

    def __init__(self, factor):
        self.factor, self.calls = factor, 0

    def __call__(self, model, *rest):
        loss = lean_step(model, *rest)
        self.calls += 1
        if self.calls == 2:
            with torch.no_grad():
                model.norm.weight.mul_(self.factor)
        return loss


def step_that_keeps_the_logits(model, optimizer, tokens, targets):
    loss = page.wasteful_step(model, optimizer, tokens, targets)
    optimizer.zero_grad()
    return loss


ANSWERS = {
    page.first: Answers(
        right=[states],
        wrong=[
            (lambda config: math.nan, "you say nan, the tracker reads"),
            (lambda config: "16 bytes", "you say '16 bytes'"),
            (lambda config: states(config) - 4, re.compile("the tracker reads [0-9,]* bytes$")),
            (lambda config: model_state_bytes(config.parameter_count()), "the step counters are missing, 4 bytes"),
            (lambda config: 16 * config.parameter_count(), "the tracker reads")],
    ),
    page.second: Answers(
        right=[evaluate],
        wrong=[
            (lambda model, tokens, targets: math.nan, "the loss is"),
            (lambda model, tokens, targets: evaluate(model, tokens, targets) * math.nan, "you return nan"),
            (lambda model, tokens, targets: evaluate(model, tokens, targets).expand(2), "of shape (2,)"),
            (lambda model, tokens, targets: model(tokens, targets).item(), "bytes of activations were kept"),
            (lambda model, tokens, targets: model(tokens, targets), "bytes of activations were kept"),
            (lambda model, tokens, targets: 1.0, "the loss is")],
    ),
    page.third: Answers(
        right=[lean_step],
        wrong=[
            (lambda *args: lean_step(*args) * math.nan, "yours is nan"),
            (lambda *args: [lean_step(*args), math.nan][1], "yours is nan"),
            (step_to_nan, "yours is nan"),
            (SpoilsTheWeights(math.nan), "the loss is right, but the weights after two steps"),
            (SpoilsTheWeights(1.01), "the loss is right, but the weights after two steps"),
            (lambda *args: [lean_step(*args), lean_step(*args), evaluate(args[0], *args[2:])][2], "loss is"),
            (step_that_keeps_the_logits, "can be had"),
            (partial(lean_step, zeros_stay=True), "can be had"),
            (page.wasteful_step, "can be had"),
            (lambda model, optimizer, *batch: evaluate(model, *batch), "loss is")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_a_prediction_may_be_a_ledger_or_a_float(said):
    assert "right" in said(page.first, lambda config: model_state_bytes(
        config.parameter_count(), tensors=len(list(GPT(config).parameters()))))
    assert "right" in said(page.first, lambda config: float(states(config)))


def test_an_error_in_the_answer_is_shown():
    with pytest.raises(ZeroDivisionError):
        page.first(lambda config: 1 / 0)
