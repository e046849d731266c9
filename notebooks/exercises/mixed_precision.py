"""Exercises of the page *Mixed precision*."""

import torch

from refimpl import memory
from refimpl.data import TextData
from refimpl.mixed_precision import (
    DynamicPrecisionModel,
    MixedPrecisionOptimizer,
    autocast,
    autocast_activation_bytes,
)
from refimpl.model import GPT, GPTConfig

from . import SCALAR, exercise, readable

HINTS = {
    "first": [
        "Count five things for each parameter: weight, gradient, master, and AdamW's two moments. Autocast changes "
        "none of them.",
        "Bytes a parameter: 16 in fp32 and under autocast; 2 + 2 + 4 + 8 with 16-bit weights; 2 more with fp32 "
        "gradients.",
        "AdamW has a step counter of 4 bytes for each tensor of `GPT(config).parameters()`. Add 4 times their number."],
    "second": [
        "Only the forward belongs under `autocast(torch.float16)`. `share` is so small that fp16 gradients become 0.",
        "Multiply the loss by `share` and by a scale such as 2**15 before `backward()`. Divide each `.grad` by the "
        "scale afterwards.",
        "`AdaptiveLossScaler()` does so: `scaler.scale(loss * share).backward()`, then `scaler.step(optimizer)`. "
        "Return `loss.detach()`."],
    "third": [
        "Begin with `\"*\"`, which matches every module, and give it the dtype of most parts outside of the blocks.",
        "Then say what `\"blocks.*\"` has, since the last pattern that matches a module counts.",
        "The norms inside of blocks match `\"blocks.*norm*\"`. Name them last."]}

CONFIG = GPTConfig(vocab_size=256, context_length=32, layers=2, hidden=32, heads=4)
OTHER = GPTConfig(vocab_size=200, context_length=32, layers=3, hidden=48, heads=4, tied=False)
RECIPES = ("fp32", "autocast", "16-bit weights", "16-bit weights, fp32 gradients")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARE = 2.0**-15  # the share of the loss that a micro-batch of 128 tokens has in a batch of four million tokens


def _model(config=CONFIG):
    torch.manual_seed(0)
    return GPT(config)


def _states(recipe, config):
    """Return the bytes of parameters, gradients and AdamW's state when all exist, as the tracker reads them."""
    tokens = torch.randint(0, 200, (2, 16))
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
    for config in (CONFIG, OTHER):
        for recipe in RECIPES:
            said, states = predict(config, recipe), _states(recipe, config)
            if said != states:
                tensors = len(list(_model(config).parameters()))
                counters = (said - states) / 4 + tensors  # if the rest of what is said is right
                why = f"; all but the step counters is right: you have {counters:.0f}, this model has {tensors} tensors"
                likely = 0 <= counters <= 4 * tensors and counters == int(counters)
                return (f"{recipe}, {config.parameter_count():,} parameters: you say {said:,} bytes, the tracker "
                        f"reads {states:,}{why * likely}")
    return None


def _step_in_fp32(model, optimizer, tokens, targets, share):
    loss = model(tokens, targets)
    (loss * share).backward()
    optimizer.step()
    return loss.detach()


def _stepped(step, share, number):
    """Run a number of steps, on autocast's default device. Returns the model, the change of all weights, how often
    the optimizer stepped and, of the last step, what was returned, the bytes of activations kept and the head's outputs
    as [(dtype, rows)]."""
    model, seen, calls = _model().to(DEVICE), [], []
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / share)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    model.head.register_forward_hook(lambda head, x, logits: seen.append((logits.dtype, len(logits))))
    for tokens, targets in list(TextData().batches(8, 16, device=DEVICE))[:number]:
        optimizer.zero_grad()
        seen.clear()
        with memory.track(model, optimizer, tokens, targets) as t:
            said = step(model, optimizer, tokens, targets, share)
    kept = t.timeline.nbytes[:, t.timeline.categories.index("activations")].max()
    moved = [(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
    return model, torch.cat(moved), len(calls), said, int(kept), seen


@exercise("parity and bytes", SCALAR)
def second(step):
    """Grade `step(model, optimizer, tokens, targets, share)`, which makes a step in fp16 on `share` times the loss and
    returns the loss.

    The weights are fp32 and stay fp32. The update must equal that of an fp32 step. The activations must be those of
    fp16 autocast, with all rows in one forward.
    """
    for share, calls in ((SHARE, 1), (SHARE / 8, 3)):
        _, expected, _, loss, *_ = _stepped(_step_in_fp32, share, calls)
        model, moved, steps, said, kept, seen = _stepped(step, share, calls)
        along = (moved @ expected / (expected @ expected)).item()
        error, aside = (((moved - each).norm() / expected.norm()).item() for each in (expected, along * expected))
        if other := {p.dtype for p in model.parameters()} - {torch.float32}:
            return f"weights are left in {other.pop()}: they are to stay in torch.float32"
        if steps != calls:
            return (f"the optimizer stepped {steps} times where your function was called {calls} times: is a step "
                    "missing, or was it skipped since the scaled gradients overflow?")
        if error != error:
            return "the weights become NaN or inf: is the scale so large that gradients overflow?"
        if abs(along - 1) > 0.02 and aside < 0.02 * along:
            return (f"your update is {along:.4g} times that in fp32: the optimizer needs the gradient of share times "
                    "the loss, divided by the scale again and not clipped")
        if not error < 0.02:
            return (f"expected weights that move as in fp32, within 2 %; yours are {100 * error:.1f} % off (do "
                    "gradients become 0?)")
        if seen != [(torch.float16, 8)]:
            what = ", ".join(f"{rows} rows in {dtype}" for dtype, rows in seen) or "nothing"
            return f"the update is right, but the head was to see 8 rows once, in fp16 autocast; it gave {what}"
        said = said if not isinstance(said, torch.Tensor) else said.item() if readable(said) else float("nan")
        if not abs(said / loss.item() - 1) < 0.002:
            return f"the update is right, but you return {said:.5g}: the loss before share and scale is {loss:.5g}"
        allowed = autocast_activation_bytes(CONFIG, 8, 16, torch.float16, DEVICE)
        if kept > allowed + 64:  # single numbers
            return f"the update is right, but {kept:,} bytes of activations are kept; autocast keeps {allowed:,}"
    return None


@exercise("the dtype of every parameter", dict)
def third(plan):
    """Grade `plan(config)`, which returns a dtype for each part: fp32 for embeddings, head and every norm, and bf16 for
    the rest."""
    for config in (CONFIG, OTHER):
        said, model = plan(config), _model(config)
        try:
            with DynamicPrecisionModel(model, said):
                dtypes = {name: p.dtype for name, p in model.named_parameters()}
        except (ValueError, TypeError) as error:
            return f"DynamicPrecisionModel refuses your plan: {error}"
        for name, dtype in dtypes.items():
            wanted = torch.float32 if "norm" in name or not name.startswith("blocks") else torch.bfloat16
            if dtype is not wanted:
                return f"under your plan {name} is in {dtype}: expected {wanted}"
    return None
