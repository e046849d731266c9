"""Exercises of the page *Where the memory goes*."""

import torch

from refimpl import memory
from refimpl.data import TextData
from refimpl.model import GPT, GPTConfig

from . import SCALAR, exercise

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
            counters = 4 * len(list(model.parameters()))
            missing = "; the step counters are missing, 4 bytes for each tensor" * (said == states - counters)
            said = f"{said:,}" if isinstance(said, (int, float)) else repr(said)
            return f"for GPTConfig({shape}) you say {said}, the tracker reads {states:,} bytes{missing}"
    return None


@exercise("parity and bytes", SCALAR)
def second(evaluate):
    """Grade `evaluate(model, tokens, targets)`, which returns the model's loss and keeps no activations at any time."""
    model, _, tokens, targets = _training()
    expected = model(tokens, targets).item()
    with memory.track(model, tokens, targets) as t:
        loss = torch.as_tensor(evaluate(model, tokens, targets)).detach()
    if loss.numel() != 1 or not abs(loss.item() - expected) <= 1e-6:  # NaN is never <=
        what = f"a tensor of shape {tuple(loss.shape)}" if loss.numel() != 1 else f"{loss.item():.6f}"
        return f"the loss is {expected:.6f}, you return {what}"
    kept = t.timeline.nbytes[:, t.timeline.categories.index("activations")].max()
    return None if kept == 0 else f"the loss is right, but {kept:,} bytes of activations were kept for no backward"


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
        result = step(model, optimizer, tokens, targets)
    return result, [p.detach() for p in model.parameters()], t.peak.total, config


@exercise("what is computed", SCALAR)
def third(step):
    """Grade `step(model, optimizer, tokens, targets)`, which does what `wasteful_step` does, at a lower peak."""
    loss, weights, wasteful, config = _two_steps(wasteful_step)
    said, same, peak, _ = _two_steps(step)
    if not torch.allclose(torch.as_tensor(said).detach(), loss.detach(), atol=1e-6):
        return f"the second step's loss is {loss.item():.6f}, yours is {said}"
    if not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights, same, strict=True)):
        return "the loss is right, but the weights after two steps are not those of wasteful_step"
    saved, logits = wasteful - peak, 4 * 4 * 32 * config.vocab_size
    wanted = 4 * config.parameter_count() + logits
    return None if saved >= wanted else (
        f"the weights are right; the peak is {saved:,} bytes lower, and {wanted:,} can be had (every gradient, and "
        f"the {logits:,} bytes of logits that somebody still holds)")
