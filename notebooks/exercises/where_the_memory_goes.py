"""Exercises of the page *Where the memory goes*."""

import math

import torch

from refimpl import memory
from refimpl.data import TextData
from refimpl.model import GPT, GPTConfig

from . import SCALAR, exercise, readable

HINTS = {
    "first": [
        "Parameters and gradients take 4 bytes a parameter, and AdamW's two moments 8.",
        "Each weight tensor has a step counter of 4 bytes: count the tensors of `GPT(config).parameters()`.",
        "`memory.model_state_bytes(config.parameter_count(), tensors=…)` returns a ledger with all of it; return its "
        "`.total`."],
    "second": [
        "Activations are kept for backward. Without a graph there is no backward, and nothing is kept.",
        "`with torch.no_grad():` around the model's call, and return what it returns."],
    "third": [
        "The wasteful step's gradients stay as zeros until the next backward. `None` frees them.",
        "Its `logits` is a local variable: the name holds them until the function returns, through backward.",
        "`loss = model(tokens, targets)` holds no logits by name. End with `optimizer.zero_grad(set_to_none=True)`."]}

CONFIGS = (
    GPTConfig(vocab_size=256, context_length=64, layers=1, hidden=32, heads=2),
    GPTConfig(vocab_size=300, context_length=32, layers=3, hidden=48, heads=4, tied=False, bias=False),
    GPTConfig(vocab_size=256, context_length=64, layers=2, hidden=64, heads=4, kv_heads=2, mlp_hidden=176,
              norm="rmsnorm", activation="swiglu", positions="rotary", bias=False),
)


def _training(config=CONFIGS[0]):
    """Return (model, optimizer, tokens, targets), the same at every call."""
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return model, optimizer, *next(TextData().batches(4, 32))


def _number(said):
    """Return a number, or a tensor of one, as a float; NaN for a tensor whose storage was freed."""
    if isinstance(said, torch.Tensor):
        return said.item() if readable(said) else math.nan
    return float(said)


@exercise("bytes", int)
def first(predict):
    """Grade `predict(config)`, which returns the bytes of parameters, gradients and AdamW states of a GPT in fp32,
    including the optimizer's step counters."""
    for config in CONFIGS:
        model, optimizer, tokens, targets = _training(config)
        with memory.track(model, optimizer) as t:
            model(tokens, targets).backward()
            optimizer.step()
        states = sum(t.now[name] for name in ("parameters", "gradients", "optimizer state"))
        said = predict(config)
        if said != states:
            defaults = vars(GPTConfig())
            shape = ", ".join(f"{name}={value}" for name, value in vars(config).items() if value != defaults[name])
            tensors = len(list(model.parameters()))
            counters = (said - states) / 4 + tensors  # if the rest of what is said is right
            why = ""
            if counters == 0:
                why = "; the step counters are missing, 4 bytes for each tensor"
            elif 0 < counters <= 4 * tensors and counters == int(counters):
                why = f"; all but the step counters is right: you have {counters:.0f}, this model has {tensors} tensors"
            return f"for GPTConfig({shape}) you say {said:,}, the tracker reads {states:,} bytes{why}"
    return None


@exercise("parity and bytes", SCALAR)
def second(evaluate):
    """Grade `evaluate(model, tokens, targets)`, which returns the model's loss and keeps no activations at any time.
    The model can be trained afterwards: its weights need gradients, and it is in training mode."""
    model, _, tokens, targets = _training()
    expected = model(tokens, targets).item()
    with memory.track(model, tokens, targets) as t:
        loss = _number(evaluate(model, tokens, targets))
    if not abs(loss - expected) <= 1e-5 * expected:  # NaN is never <=
        return f"the loss is {expected:.6f}, you return {loss:.6f}"
    kept = t.timeline.nbytes[:, t.timeline.categories.index("activations")].max()
    if kept:
        return f"the loss is right, but {kept:,} bytes of activations were kept for no backward"
    if frozen := sum(not p.requires_grad for p in model.parameters()):
        return f"right, but {frozen} parameters need no gradient any more: the model cannot be trained"
    return None if model.training else (
        "right, but the model is left in eval mode, where dropout does nothing: call `model.train()` before you return")


def wasteful_step(model, optimizer, tokens, targets):
    """Make a training step that holds more than it needs; returns the loss. The third exercise improves it."""
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return loss


def _two_steps(step, config=CONFIGS[0]):
    model, optimizer, tokens, targets = _training(config)
    step(model, optimizer, tokens, targets)
    with memory.track(model, optimizer, tokens, targets) as t:
        loss = _number(step(model, optimizer, tokens, targets))
    return loss, [p.detach() for p in model.parameters()], t.peak.total, config


@exercise("parity and bytes", SCALAR)
def third(step):
    """Grade `step(model, optimizer, tokens, targets)`, which does what `wasteful_step` does, at a lower peak."""
    loss, weights, wasteful, config = _two_steps(wasteful_step)
    said, same, peak, _ = _two_steps(step)
    if not abs(said - loss) <= 1e-5 * loss:
        return f"the second step's loss is {loss:.6f}, yours is {said:.6f}"
    if not all(readable(b) and torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, same, strict=True)):
        return "the loss is right, but the weights after two steps are not those of wasteful_step"
    saved, logits = wasteful - peak, 4 * 4 * 32 * config.vocab_size
    wanted = 4 * config.parameter_count() + logits
    return None if saved >= wanted else (
        f"the weights are right; the peak is {saved:,} bytes lower, and {wanted:,} can be had (every gradient, and "
        f"the {logits:,} bytes of logits that somebody still holds)")
