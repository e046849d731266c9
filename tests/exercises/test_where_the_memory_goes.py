"""Right answers pass, wrong and unanswered ones do not."""

import pytest
import torch

from refimpl.exercises import where_the_memory_goes as page
from refimpl.memory import model_state_bytes
from refimpl.model import GPT


def said(capsys, exercise, answer):
    exercise(answer)
    return capsys.readouterr().out


def states(config):
    tensors = len(list(GPT(config).parameters()))
    return model_state_bytes(config.parameter_count(), "adamw", tensors=tensors).total


def evaluate(model, tokens, targets):
    with torch.no_grad():
        return model(tokens, targets)


def lean_step(model, optimizer, tokens, targets):
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def no_training(model, optimizer, tokens, targets):
    return evaluate(model, tokens, targets)


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, states), (page.second, evaluate), (page.third, lean_step),
])
def test_right_answers(capsys, exercise, answer):
    assert "right, on parity and on bytes" in said(capsys, exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, lambda config: 16 * config.parameter_count(), "the tracker reads"),
    (page.second, lambda model, tokens, targets: model(tokens, targets), "bytes of activations were kept"),
    (page.second, lambda model, tokens, targets: 1.0, "the loss is"),
    (page.third, page.wasteful_step, "can be had"),
    (page.third, no_training, "loss is"),
])
def test_wrong_answers(capsys, exercise, answer, complaint):
    assert complaint in said(capsys, exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
@pytest.mark.parametrize("blank", [None, ...])
def test_blank_answers(capsys, exercise, blank):
    assert "not answered yet" in said(capsys, exercise, lambda *args: blank)


def test_an_error_in_the_answer_is_shown():
    with pytest.raises(ZeroDivisionError):
        page.first(lambda config: 1 / 0)
