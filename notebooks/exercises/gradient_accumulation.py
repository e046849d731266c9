"""Exercises of the page *Gradient accumulation*."""

import math

import torch

from refimpl import memory
from refimpl.model import GPT, GPTConfig

from . import SCALAR, exercise, readable

HINTS = {
    "first": [
        "Count the targets of the whole batch that are not −100, before the first forward.",
        "`model(x, y)` is the mean over the targets of one micro-batch. Multiply it by the micro-batch's targets, and "
        "divide by all targets. Leave out a micro-batch that has none.",
        "In the loop over `zip(tokens.split(micro_batch), targets.split(micro_batch))`: forward, `backward()` of the "
        "weighted loss, and add `.detach()` of that loss to what you return."],
    "second": [
        "Only the activations of one micro-batch exist at a time: `memory.activation_bytes(config, rows, sequence)`.",
        "A gradient takes 4 bytes a parameter. Do gradients exist already where the last backward begins, at the peak?",
        "They do if there is more than one micro-batch. With one, the peak has activations alone."],
    "third": [
        "Keep a dict {parameter: sum in fp32}. A hook gets the parameter when its `.grad` is complete.",
        "In the hook: add `parameter.grad` to the sum (the first time it is `parameter.grad.float()`), and set "
        "`parameter.grad = None`.",
        "After the loop: `remove()` each hook's handle, and set each `parameter.grad` to its sum in bf16. The loss of "
        "a micro-batch counts for its rows divided by all rows."]}

CONFIG = GPTConfig(vocab_size=256, context_length=64, layers=2, hidden=64, heads=4)
LENGTHS = (32, 3, 17, 1, 0, 30, 2, 9, 24, 5, 1, 12)  # targets of each row


def mean_of_means(model, tokens, targets, micro_batch):
    """Accumulate gradients by the loop of many scripts. It is right only if all micro-batches have equally many
    targets."""
    parts = list(zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True))
    for part in parts:
        (model(*part) / len(parts)).backward()


def fresh_model(dtype=torch.float32):
    """Return a model whose losses differ from row to row: its weights are ten times as large as at first."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for parameter in model.parameters():
        parameter.data *= 10 if parameter.ndim == 2 else 1
    return model.to(dtype)


def ragged(rows):
    """Return (model, tokens, targets), the same at every call. Rows differ in length, padded with targets of −100."""
    model, tokens, targets = fresh_model(), *torch.randint(0, 256, (2, rows, 32))
    for row in range(rows):
        targets[row, LENGTHS[row % len(LENGTHS)] :] = -100
    return model, tokens, targets


def forwards(step, model, tokens, targets, micro_batch):
    """Call `step`. Returns what it returns, the Track, and the most rows that it ran forward at a time."""
    rows = []
    hook = model.register_forward_pre_hook(
        lambda _, args, options: rows.append(len((*args, *options.values())[0])), with_kwargs=True)
    with memory.track(model, tokens, targets) as t:
        said = step(model, tokens, targets, micro_batch)
    hook.remove()
    return said, t, max(rows, default=0)


def gradient_fault(model, expected, most, case):
    """Return a sentence if a gradient is missing, cannot be read, or is off by more than `most` of the norm."""
    found = [parameter.grad for parameter in model.parameters()]
    if any(gradient is None or not readable(gradient) for gradient in found):
        return f"{case}: a parameter has no gradient in the end"
    found, expected = (torch.cat([each.double().flatten() for each in all]) for all in (found, expected))
    if not found.isfinite().all():
        return f"{case}: the gradient has NaN or inf in it"
    along = (found @ expected / (expected @ expected)).item()
    apart = ((found - expected).norm() / expected.norm()).item()
    if apart <= most:
        return None
    if abs(along - 1) > 0.02 and (found - along * expected).norm() <= 0.02 * found.norm():
        return f"{case}: your gradient is {along:.4g} times what it has to be"
    return f"{case}: your gradient is off by {apart:.2g} of its norm; allowed are {most:.2g}"


def loss_fault(said, expected, most):
    """Return a sentence if a returned loss cannot be read, or is off by more than the share `most`."""
    if isinstance(said, torch.Tensor) and not readable(said):
        return "you return a loss whose storage was freed"
    said = float(said.detach() if isinstance(said, torch.Tensor) else said)
    if math.isnan(said):
        return "the gradient is right, but you return NaN: a micro-batch without targets has no mean, so leave it out"
    if abs(said - expected) <= most * expected:
        return None
    return f"the gradient is right, but you return a loss of {said:.6g}; that of the batch is {expected:.6g}"


@exercise("parity and bytes", SCALAR)
def first(step):
    """Grade `step(model, tokens, targets, micro_batch)`, which leaves the gradient of the mean loss over all targets of
    the batch in `.grad` (None before) and returns that loss. It runs `micro_batch` rows at a time, with a peak that
    does not grow with the batch."""
    peaks = {}
    for rows, micro_batch in ((6, 3), (12, 3), (7, 2), (5, 1)):
        model, tokens, targets = ragged(rows)
        loss = model(tokens, targets)
        expected = torch.autograd.grad(loss, list(model.parameters()))
        said, t, most = forwards(step, model, tokens, targets, micro_batch)
        case = f"{rows} rows by {micro_batch}"
        if wrong := gradient_fault(model, expected, 1e-5, case) or loss_fault(said, loss.item(), 1e-5):
            return wrong
        if other := {p.grad.dtype for p in model.parameters()} - {torch.float32}:
            return f"the gradient is right, but in {other.pop()}: expected torch.float32"
        if most != micro_batch:
            return f"{case}: the gradient is right, but a forward had {most} rows"
        peaks[rows] = t.peak.total - t.start.total
    grown = peaks[12] - peaks[6]
    return None if grown < 4096 else f"the gradient is right, but 6 more rows raise the peak by {grown:,} bytes"


@exercise("bytes", int)
def second(predict):
    """Grade `predict(config, effective_batch, micro_batch, sequence)`, which returns the bytes of gradients and
    activations at the peak of a step in fp32. Gradients are None before the step."""
    for batch, micro_batch, sequence, layers, hidden in (
            (8, 2, 32, 1, 32), (8, 8, 32, 1, 32), (4, 1, 24, 2, 32), (7, 3, 40, 1, 48)):
        config = GPTConfig(vocab_size=200, context_length=64, layers=layers, hidden=hidden, heads=2)
        model, tokens = GPT(config), torch.zeros(batch, sequence, dtype=torch.int64)
        with memory.track(model) as t:
            mean_of_means(model, tokens, tokens, micro_batch)
        read = t.peak["gradients"] + t.peak["activations"]
        said = predict(config, batch, micro_batch, sequence)
        if not abs(said - read) <= 4:  # a 4-byte number of targets may still be there, or not
            logits = 4 * micro_batch * sequence * config.vocab_size
            more = "; the gradients of logits and log-probabilities are temporaries: leave them out"
            return (f"{batch} rows of {sequence} tokens by {micro_batch}, {layers} layer{'s' * (layers > 1)}: you say "
                    f"{said:,}, the tracker reads {read:,} bytes{more * (abs(said - read - 2 * logits) <= 16)}")
    return None


def _summed(model, tokens, targets, micro_batch):
    """Return (the sum in fp64 of the micro-batches' gradients, each weighted by its rows; the sum of their losses)."""
    exact, loss = [torch.zeros_like(each, dtype=torch.float64) for each in model.parameters()], 0.0
    for x, y in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
        mean = model(x, y)
        for total, gradient in zip(exact, torch.autograd.grad(mean, list(model.parameters())), strict=True):
            total += gradient.double() * len(x) / len(tokens)
        loss += mean.item() * len(x) / len(tokens)
    return exact, loss


@exercise("parity and bytes", SCALAR)
def third(step):
    """Grade `step(model, tokens, targets, micro_batch)`, which does what the first one does, for a model in bf16 and
    rows of equal length. It sums in fp32 and leaves bf16 in `.grad`. During a backward, the bf16 gradients of at most
    one layer exist beside the sums."""
    count = CONFIG.parameter_count()
    layer = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in fresh_model().modules())
    limit = 4 * count + (2 + 4) * layer
    for rows, micro_batch, most in ((64, 1, 2**-8), (5, 2, 0.02)):  # 2/5 is rounded in bf16, 1/64 is not
        model, tokens, targets = fresh_model(torch.bfloat16), *torch.randint(0, 256, (2, rows, 8))
        exact, loss = _summed(model, tokens, targets, micro_batch)
        said, t, forward = forwards(step, model, tokens, targets, micro_batch)
        case = f"{rows} rows by {micro_batch}"
        if any(parameter._post_accumulate_grad_hooks or parameter._backward_hooks for parameter in model.parameters()):
            return "hooks of yours are left on the parameters: remove() them"
        if wrong := gradient_fault(model, exact, most, case):
            return wrong + (", since a sum in bf16 loses small terms" if "is off" in wrong else "")
        if wrong := loss_fault(said, loss, 1e-3):
            return wrong
        if left := {p.grad.dtype for p in model.parameters()} - {torch.bfloat16}:
            return f"the sum is right, but `.grad` is left in {left.pop()}, not in bf16"
        if forward != micro_batch:
            return f"{case}: the gradient is right, but a forward had {forward} rows"
        columns = [t.timeline.categories.index(name) for name in ("gradients", "temporaries")]
        backward = [op.phase == "backward" for op in t.timeline.ops]
        held = t.timeline.nbytes[backward][:, columns].sum(axis=1).max()
        if held > limit + count:  # for temporaries: half the bytes of all bf16 gradients
            return (f"the gradient is right, but sums and gradients were {held:,} bytes in a backward; fp32 sums and "
                    f"the gradients of the largest layer, in bf16 and fp32, are {limit:,}")
    return None
