"""Right answers pass, wrong and unanswered ones do not."""

import pytest
import torch

from refimpl import memory
from refimpl.exercises import reading_the_meters as page
from refimpl.model import GPT


def said(capsys, exercise, answer):
    exercise(answer)
    return capsys.readouterr().out


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


@pytest.mark.parametrize(("exercise", "answer"), [(page.first, validate), (page.second, culprit), (page.third, fits)])
def test_right_answers(capsys, exercise, answer):
    assert "right, on parity and on bytes" in said(capsys, exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, page.leaking_validation, "4 more batches raise the peak"),
    (page.first, lambda model, batches: 5.0, "the mean loss is"),
    (page.second, lambda trace: ("GPT", 1), "you say"),
    (page.third, lambda *args: True, "build_and_step peaks at"),
    (page.third, lambda *args: False, "build_and_step peaks at"),
])
def test_wrong_answers(capsys, exercise, answer, complaint):
    assert complaint in said(capsys, exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(capsys, exercise):
    assert "not answered yet" in said(capsys, exercise, lambda *args: None)
