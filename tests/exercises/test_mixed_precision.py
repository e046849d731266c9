"""Right answers pass, wrong and unanswered ones do not."""

import re
from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import mixed_precision as page
from refimpl import memory
from refimpl.mixed_precision import AdaptiveLossScaler, autocast
from refimpl.model import GPT

# --- first -----------------------------------------------------------------------------------------------------------


def predict(config, recipe):
    weight, gradient, state = 4, 4, 8
    if recipe.startswith("16-bit weights"):
        weight, gradient, state = 2, 2, 4 + 8
    if recipe.endswith("fp32 gradients"):
        gradient = 4
    counters = 4 * len(list(GPT(config).parameters()))
    return config.parameter_count() * (weight + gradient + state) + counters


def by_model_states(config, recipe):
    precision = {"16-bit weights": "bf16 + fp32 master",
                 "16-bit weights, fp32 gradients": "bf16 + fp32 master and gradients"}.get(recipe, "fp32")
    tensors = 3 + (not config.tied) + 12 * config.layers + 1
    return memory.model_state_bytes(config.parameter_count(), "adamw", precision, tensors)


def by_shapes(config, recipe):
    each = 18 if "gradients" in recipe else 16
    return sum(each * p.numel() + 4 for p in GPT(config, device="meta").parameters())


def with_fault(config, recipe, *, change=None, counters=1, tensors=lambda config: 0):
    """An answer of which some recipes take another number of bytes a parameter."""
    more = (change or {}).get(recipe, 0) * config.parameter_count()
    counter = 4 * len(list(GPT(config).parameters()))
    return predict(config, recipe) + more + (counters - 1) * counter + 4 * tensors(config)


# --- second ----------------------------------------------------------------------------------------------------------


def fp16_step(model, optimizer, tokens, targets, share):
    scaler = AdaptiveLossScaler()
    with autocast(torch.float16):
        loss = model(tokens, targets)
    scaler.scale(loss * share).backward()
    scaler.step(optimizer)
    return loss.detach()


def scaled(scale, divisor=None, dtype=torch.float16, kept=lambda loss: 0.0, said=lambda loss, scaled: loss.detach(),
           step=True, shared=True):
    """An answer that multiplies the loss by `scale`, and divides the gradients by `divisor` (the scale) again.

    `kept(loss)`: what hangs on the loss besides.
    """

    def fp16_step(model, optimizer, tokens, targets, share):
        with autocast(dtype):
            loss = model(tokens, targets)
        whole = loss * (share if shared else 1) * scale + kept(loss)
        whole.backward()
        for p in model.parameters():
            p.grad /= scale if divisor is None else divisor
        if step:
            optimizer.step()
        return said(loss, whole)

    return fp16_step


def with_torch(model, optimizer, tokens, targets, share):
    device = tokens.device.type
    scaler = torch.amp.GradScaler(device, init_scale=2.0**17)
    with torch.autocast(device, torch.float16):
        loss = model(tokens, targets)
    scaler.scale(loss * share).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss.item()


def without_share(model, optimizer, tokens, targets, share):
    """The whole loss is scale enough; its gradients get their share afterwards."""
    with autocast(torch.float16):
        loss = model(tokens, targets)
    loss.backward()
    torch._foreach_mul_([p.grad for p in model.parameters()], share)
    optimizer.step()
    return loss.detach()


def row_by_row(model, optimizer, tokens, targets, share):
    total = 0.0
    for x, y in zip(tokens, targets, strict=True):
        with autocast(torch.float16):
            loss = model(x[None], y[None]) / len(tokens)
        (loss * share * 2**15).backward()
        total += loss.detach()
    for p in model.parameters():
        p.grad /= 2**15
    optimizer.step()
    return total


def weights_in_fp16(model, optimizer, tokens, targets, share, back=True):
    model.half()
    loss = model(tokens, targets)
    (loss * share * 2**15).backward()
    for p in model.parameters():
        p.grad /= 2**15
    optimizer.step()
    if back:
        model.float()
    return loss.detach().float()


def skipping(model, optimizer, tokens, targets, share):
    scaler = AdaptiveLossScaler(init_scale=2.0**40, max_scale=2.0**40)
    with autocast(torch.float16):
        loss = model(tokens, targets)
    scaler.scale(loss * share).backward()
    scaler.step(optimizer)
    return loss.detach()


def clipped(model, optimizer, tokens, targets, share):
    with autocast(torch.float16):
        loss = model(tokens, targets)
    (loss * share * 2**15).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for p in model.parameters():
        p.grad /= 2**15
    optimizer.step()
    return loss.detach()


def in_fp32(*given):
    return page._step_in_fp32(*given)


def much(loss):
    return 0 * torch.randn(100_000, device=loss.device, requires_grad=True).exp().sum()


# --- third -----------------------------------------------------------------------------------------------------------


def plan(config):
    return {"*": torch.float32, "blocks.*": torch.bfloat16, "blocks.*norm*": torch.float32}


def linears_alone(config):
    return {"blocks.*.attention": torch.bfloat16, "blocks.*.mlp": torch.bfloat16}


def by_number(config):
    return {f"blocks.{i}.{part}": "bf16" for i in range(config.layers) for part in ("attention", "mlp")}


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ANSWERS = {
    page.first: Answers(
        right=[predict, by_model_states, by_shapes],
        wrong=[
            (lambda config, recipe: predict(config, recipe) // (1 if recipe == "fp32" else 2),
             "autocast, 34,688 parameters: you say"),
            (partial(with_fault, change={"autocast": 2}), "autocast, 34,688 parameters: you say"),
            (partial(with_fault, change={"16-bit weights": -4, "16-bit weights, fp32 gradients": -4}),
             "16-bit weights, 34,688 parameters: you say"),
            (partial(with_fault, change={"16-bit weights, fp32 gradients": -2}), "16-bit weights, fp32 gradients"),
            (partial(with_fault, change={"16-bit weights, fp32 gradients": 2}), "16-bit weights, fp32 gradients"),
            (partial(with_fault, counters=0), "the step counters is right: you have 0, this model has 28 tensors"),
            (partial(with_fault, counters=2), "fp32, 34,688 parameters: you say"),
            (partial(with_fault, tensors=lambda config: -(not config.tied)), "fp32, 105,648 parameters: you say"),
            (lambda config, recipe: 555_120, "16-bit weights, fp32 gradients, 34,688 parameters"),
            (lambda config, recipe: predict(page.CONFIG, recipe), "parameters: you say")],
    ),
    page.second: Answers(
        right=[fp16_step, scaled(2.0**15), with_torch, without_share],
        wrong=[
            (scaled(1.0), "do gradients become 0"),
            (scaled(2.0**40), "the weights become NaN or inf: is the scale so large"),
            (scaled(2.0**15, divisor=1.0), re.compile(r"your update is 3\.\d+e\+04 times that in fp32")),
            (scaled(2.0**15, divisor=2.0**14), re.compile(r"your update is (2|2\.00\d|1\.99\d) times that in fp32")),
            (scaled(1.0, shared=False), re.compile(r"your update is 3\.\d+e\+04 times that in fp32")),
            (scaled(2.0**9, shared=False), re.compile(r"your update is 3\.\d+e\+04 times that in fp32")),
            (scaled(2.0**15, step=False), "the optimizer stepped 0 times where your function was called 1 times"),
            (skipping, "is a step missing, or was it skipped since"),
            (in_fp32, "it gave 8 rows in torch.float32"),
            (scaled(1.0, dtype=torch.bfloat16), "it gave 8 rows in torch.bfloat16"),
            (row_by_row, "it gave 1 rows in torch.float16, 1 rows"),
            (weights_in_fp16, "expected weights that move"),
            (partial(weights_in_fp16, back=False), "weights are left in torch.float16"),
            (clipped, re.compile(r"your update is 0\.\d+ times that in fp32")),
            (scaled(2.0**15, said=lambda loss, whole: whole.detach()), "the loss before share and scale is"),
            (scaled(2.0**15, said=lambda loss, whole: 1.0), "but you return 1: the loss before")],
        saves_nothing=(scaled(2.0**15, kept=much), "bytes of activations are kept; autocast keeps"),
    ),
    page.third: Answers(
        right=[plan, linears_alone, by_number],
        wrong=[
            (lambda config: {"*": BF16}, "embedding.weight is in torch.bfloat16: expected torch.float32"),
            (lambda config: {"blocks.*": BF16}, "blocks.0.norm1.weight is in torch.bfloat16"),
            (lambda config: {"blocks.*norm*": FP32, "blocks.*": BF16}, "blocks.0.norm1.weight is in"),
            (lambda config: {"*": "bf16", "*norm*": "fp32", "head": "fp32"}, "are one parameter, and the plan"),
            (lambda config: {"blocks.0.attention": "bf16", "blocks.*.mlp": "bf16"}, "blocks.1.attention.qkv.weight is"),
            (lambda config: {"blocks.*.attention": "bf16"}, "blocks.0.mlp.up.weight is in torch.float32"),
            (lambda config: {"block.*": BF16}, "plan['block.*'] matches no module"),
            (lambda config: {"blocks.*": "float16"}, "expected torch.float32, torch.bfloat16 or torch.float16"),
            (lambda config: {"blocks.*": FP16, "*norm*": "fp32"}, "is in torch.float16: expected torch.bfloat16"),
            (lambda config: by_number(page.CONFIG), "blocks.2.attention.qkv.weight is in torch.float32"),
            (lambda config: {"*": "fp32", "*.attention": "bf16", "*.mlp": "bf16", "positions": "bf16"},
             "positions.weight is in torch.bfloat16"),
            (lambda config: list(plan(config).items()), "expected a dict")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
