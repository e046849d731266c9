"""Exercises of the page *Mixed precision*."""

import torch

from refimpl import memory
from refimpl.data import TextData
from refimpl.mixed_precision import (
    DynamicPrecisionModel,
    MixedPrecisionOptimizer,
    autocast,
    autocast_activation_bytes,
    plan_bytes,
)
from refimpl.model import GPT, GPTConfig

from . import exercise

CONFIG = GPTConfig(vocab_size=256, context_length=32, layers=2, hidden=32, heads=4)
RECIPES = ("fp32", "autocast", "16-bit weights", "16-bit weights, fp32 gradients")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARE = 2.0**-15  # the share of the loss that a micro-batch of 128 tokens has in a batch of four million tokens


def _model(config=CONFIG):
    torch.manual_seed(0)
    return GPT(config)


def _states(recipe, config):
    """Return the bytes of parameters, gradients and AdamW's state when all exist, as the tracker reads them."""
    tokens = torch.randint(0, 256, (2, 16))
    with memory.track() as t:
        model = _model(config)
        optimizer = torch.optim.AdamW(model.parameters())
        if recipe.startswith("16-bit"):
            optimizer = MixedPrecisionOptimizer(optimizer, fp32_gradients="gradients" in recipe)
        with autocast(device_type="cpu", enabled=recipe == "autocast"):
            loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
    return sum(t.now[name] for name in ("parameters", "gradients", "optimizer state"))


@exercise("bytes", int)
def first(predict):
    """Grade `predict(config, recipe)`, which returns the bytes of model states under one of `RECIPES`, including the
    optimizer's step counters."""
    for config in (CONFIG, GPTConfig(vocab_size=256, context_length=32, layers=1, hidden=48, heads=4, tied=False)):
        for recipe in RECIPES:
            said, states = predict(config, recipe), _states(recipe, config)
            said = int(said)
            if said != states:
                return (f"{recipe}, {config.parameter_count():,} parameters: you say {said:,} bytes, the tracker "
                        f"reads {states:,}")
    return None


def _step_in_fp32(model, optimizer, tokens, targets, share):
    (model(tokens, targets) * share).backward()
    optimizer.step()
    return True


def _stepped(step):
    """Run three steps on micro-batches, on autocast's default device. Returns the change of all weights and, of the
    last step, the bytes of activations kept and the head's outputs as [(dtype, rows)]."""
    model, seen = _model().to(DEVICE), []
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / SHARE)
    model.head.register_forward_hook(lambda head, x, logits: seen.append((logits.dtype, len(logits))))
    for tokens, targets in list(TextData().batches(8, 16, device=DEVICE))[:3]:
        optimizer.zero_grad()
        seen.clear()
        with memory.track(model, optimizer, tokens, targets) as t:
            step(model, optimizer, tokens, targets, SHARE)
    kept = t.timeline.nbytes[:, t.timeline.categories.index("activations")].max()
    moved = [(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
    return torch.cat(moved), int(kept), seen


@exercise("what is computed")
def second(step):
    """Grade `step(model, optimizer, tokens, targets, share)`, which makes a step in fp16 on `share` times the loss and
    returns True.

    The weights are fp32 and stay fp32. The update must equal that of an fp32 step. The activations must be those of
    fp16 autocast, with all rows in one forward.
    """
    expected, *_ = _stepped(_step_in_fp32)
    said, kept, seen = _stepped(step)
    error = ((said - expected).norm() / expected.norm()).item()
    allowed = autocast_activation_bytes(CONFIG, 8, 16, torch.float16, DEVICE)
    if not error < 2:  # NaN is not
        return "the weights move much too far: were the gradients divided by the scale again, or was it too large?"
    if not error < 0.02:
        return f"the weights move as in fp32 within 2 %; yours are {100 * error:.0f} % off (do gradients become 0?)"
    if seen != [(torch.float16, 8)]:
        what = ", ".join(f"{rows} rows in {dtype}" for dtype, rows in seen) or "nothing"
        return f"the update is right, but the head was to see 8 rows once, in fp16 autocast; it gave {what}"
    if kept > allowed:
        return f"the update is right, but {kept:,} bytes of activations are kept; autocast keeps {allowed:,}"
    return None


@exercise("what is computed")
def third(plan):
    """Grade `plan(config)`, which returns a dtype for each part: fp32 for embeddings, head and every norm, and bf16 for
    the rest."""
    for config in (CONFIG, GPTConfig(vocab_size=256, context_length=32, layers=1, hidden=32, heads=4, tied=False)):
        said, model = plan(config), _model(config)
        norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)
        blocks = sum(p.numel() for p in model.blocks.parameters())
        high = config.parameter_count() - blocks + norms - sum(p.numel() for p in model.norm.parameters())
        wanted = 2 * config.parameter_count() + 2 * high
        if plan_bytes(model, said) != wanted:
            return f"the parameters take {plan_bytes(model, said):,} bytes under your plan, not {wanted:,}"
        with DynamicPrecisionModel(model, said) as low:
            logits = low(torch.arange(16)[None])
            wrong = [name for name, p in model.named_parameters()
                     if (p.dtype is torch.float32) != ("norm" in name or not name.startswith("blocks"))]
        if wrong or logits.dtype is not torch.float32:
            return f"the bytes are right, but not the dtype of {', '.join(wrong) or 'the logits'}"
    return None
