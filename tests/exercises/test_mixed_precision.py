"""Right answers pass, wrong and unanswered ones do not."""

import pytest
import torch

from refimpl import memory
from refimpl.exercises import mixed_precision as page
from refimpl.mixed_precision import AdaptiveLossScaler, autocast


def said(capsys, exercise, answer):
    exercise(answer)
    return capsys.readouterr().out


def predict(config, recipe):
    precision = {"16-bit weights": "bf16 + fp32 master",
                 "16-bit weights, fp32 gradients": "bf16 + fp32 master and gradients"}.get(recipe, "fp32")
    tensors = 3 + (not config.tied) + 12 * config.layers + 1
    return memory.model_state_bytes(config.parameter_count(), "adamw", precision, tensors)


def with_a_scaler(model, optimizer, tokens, targets, share):
    scaler = AdaptiveLossScaler()
    with autocast(torch.float16):
        loss = model(tokens, targets)
    scaler.scale(loss * share).backward()
    scaler.step(optimizer)
    return True


def by_hand(model, optimizer, tokens, targets, share):
    with autocast(torch.float16):
        loss = model(tokens, targets)
    (loss * share * 2**15).backward()
    for p in model.parameters():
        p.grad /= 2**15
    optimizer.step()
    return True


def without_a_scale(model, optimizer, tokens, targets, share):
    with autocast(torch.float16):
        loss = model(tokens, targets)
    (loss * share).backward()
    optimizer.step()
    return True


def too_large_a_scale(model, optimizer, tokens, targets, share):
    with autocast(torch.float16):
        loss = model(tokens, targets)
    (loss * share * 2.0**40).backward()
    for p in model.parameters():
        p.grad /= 2.0**40
    optimizer.step()
    return True


def not_unscaled(model, optimizer, tokens, targets, share):
    with autocast(torch.float16):
        loss = model(tokens, targets)
    (loss * share * 2**15).backward()
    optimizer.step()
    return True


def in_bf16(model, optimizer, tokens, targets, share):
    with autocast(torch.bfloat16):
        loss = model(tokens, targets)
    (loss * share).backward()
    optimizer.step()
    return True


def row_by_row(model, optimizer, tokens, targets, share):
    for x, y in zip(tokens, targets, strict=True):
        (model(x[None], y[None]) * share / len(tokens)).backward()
    optimizer.step()
    return True


def keeping_more(model, optimizer, tokens, targets, share):
    with autocast(torch.float16):
        loss = model(tokens, targets)
    kept = torch.randn(100_000, device=loss.device, requires_grad=True).exp()
    (loss * share * 2**15 + 0 * kept.sum()).backward()
    for p in model.parameters():
        p.grad /= 2**15
    optimizer.step()
    return True


def plan(config):
    return {"*": torch.float32, "blocks.*": torch.bfloat16, "blocks.*norm*": torch.float32}


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, predict), (page.second, with_a_scaler), (page.second, by_hand), (page.third, plan),
])
def test_right_answers(capsys, exercise, answer):
    assert "right, on parity and on bytes" in said(capsys, exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, lambda config, recipe: 8 * config.parameter_count(), "the tracker reads"),
    (page.second, without_a_scale, "do gradients become 0"),
    (page.second, too_large_a_scale, "or was it too large"),
    (page.second, not_unscaled, "were the gradients divided by the scale again"),
    (page.second, page._step_in_fp32, "it gave 8 rows in torch.float32"),
    (page.second, in_bf16, "it gave 8 rows in torch.bfloat16"),
    (page.second, row_by_row, "it gave 1 rows in torch.float32, 1 rows"),
    (page.second, keeping_more, "bytes of activations are kept; autocast keeps"),
    (page.third, lambda config: {"*": torch.bfloat16}, "under your plan"),
    (page.third, lambda config: {"blocks.*": torch.bfloat16}, "under your plan"),
])
def test_wrong_answers(capsys, exercise, answer, complaint):
    assert complaint in said(capsys, exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
@pytest.mark.parametrize("blank", [None, ...])
def test_blank_answers(capsys, exercise, blank):
    assert "not answered yet" in said(capsys, exercise, lambda *args: blank)
