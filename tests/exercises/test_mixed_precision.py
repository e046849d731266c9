"""Right answers pass, wrong and unanswered ones do not."""

import torch
from exercises_kit import Answers, graded

from exercises import mixed_precision as page
from refimpl import memory
from refimpl.mixed_precision import AdaptiveLossScaler, autocast


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


def scaled(scale, divisor=None, dtype=torch.float16, kept=lambda loss: 0.0):
    """An answer that multiplies the loss by `scale`, and divides the gradients by `divisor` (the scale) again.

    `kept(loss)`: what hangs on the loss besides.
    """

    def step(model, optimizer, tokens, targets, share):
        with autocast(dtype):
            loss = model(tokens, targets)
        (loss * share * scale + kept(loss)).backward()
        for p in model.parameters():
            p.grad /= scale if divisor is None else divisor
        optimizer.step()
        return True

    return step


def row_by_row(model, optimizer, tokens, targets, share):
    for x, y in zip(tokens, targets, strict=True):
        (model(x[None], y[None]) * share / len(tokens)).backward()
    optimizer.step()
    return True


def much(loss):
    return 0 * torch.randn(100_000, device=loss.device, requires_grad=True).exp().sum()


def plan(config):
    return {"*": torch.float32, "blocks.*": torch.bfloat16, "blocks.*norm*": torch.float32}


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (lambda config, recipe: 8 * config.parameter_count(), "the tracker reads")],
    ),
    page.second: Answers(
        right=[with_a_scaler, scaled(2.0**15)],
        wrong=[
            (scaled(1.0), "do gradients become 0"),
            (scaled(2.0**40), "or was it too large"),
            (scaled(2.0**15, divisor=1.0), "were the gradients divided by the scale again"),
            (page._step_in_fp32, "it gave 8 rows in torch.float32"),
            (scaled(1.0, dtype=torch.bfloat16), "it gave 8 rows in torch.bfloat16"),
            (row_by_row, "it gave 1 rows in torch.float32, 1 rows"),
            (scaled(2.0**15, kept=much), "bytes of activations are kept; autocast keeps")],
    ),
    page.third: Answers(
        right=[plan],
        wrong=[
            (lambda config: {"*": torch.bfloat16}, "under your plan"),
            (lambda config: {"blocks.*": torch.bfloat16}, "under your plan")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
