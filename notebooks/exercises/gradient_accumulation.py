"""Exercises of the page *Gradient accumulation*."""

import torch

from refimpl import memory
from refimpl.model import GPT, GPTConfig

from . import exercise

CONFIG = GPTConfig(vocab_size=256, context_length=64, layers=2, hidden=64, heads=4)
LENGTHS = (32, 3, 17, 1, 0, 30, 2, 9, 24, 5, 1, 12)  # targets of each row


def mean_of_means(model, tokens, targets, micro_batch):
    """Accumulate gradients by the loop of many scripts. It is right only if all micro-batches have equally many
    targets."""
    parts = list(zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True))
    for part in parts:
        (model(*part) / len(parts)).backward()


def ragged(rows):
    """Return (model, tokens, targets), the same at every call. Rows differ in length, padded with targets of −100."""
    torch.manual_seed(0)
    model, tokens, targets = GPT(CONFIG), *torch.randint(0, 256, (2, rows, 32))
    for row in range(rows):
        targets[row, LENGTHS[row % len(LENGTHS)] :] = -100
    return model, tokens, targets


def _distance(model, expected):
    """Return ‖gradients − expected‖ / ‖expected‖ of the model's gradients; None if one is missing."""
    found = [parameter.grad for parameter in model.parameters()]
    if any(gradient is None for gradient in found):
        return None
    apart = sum((a.double() - b.double()).square().sum() for a, b in zip(found, expected, strict=True))
    return (apart / sum(each.double().square().sum() for each in expected)).sqrt().item()


def _gradients(model, *batch):
    model(*batch).backward()
    return [parameter.grad for parameter in model.parameters()]


@exercise("parity and bytes")
def first(step):
    """Grade `step(model, tokens, targets, micro_batch)`, which adds the gradient of the mean loss over all targets of
    the batch to `.grad`, with a peak that does not grow with the batch. It returns anything but None."""
    expected = _gradients(*ragged(12))
    peaks = {}
    for rows in (6, 12):
        model, tokens, targets = ragged(rows)
        with memory.track(model, tokens, targets) as t:
            step(model, tokens, targets, 3)
        peaks[rows] = t.peak.total - t.start.total
    apart = _distance(model, expected)
    if apart is None:
        return "a parameter has no gradient"
    if not apart <= 1e-5:
        return f"the gradient of the whole batch is another one: yours is off by {apart:.1%} of its norm"
    grown = peaks[12] - peaks[6]
    return None if grown < 4096 else f"the gradient is right, but 6 more rows raise the peak by {grown:,} bytes"


@exercise("bytes", int)
def second(predict):
    """Grade `predict(config, effective_batch, micro_batch, sequence)`, which returns the bytes of gradients and
    activations at the peak of a step in fp32. Gradients are None before the step."""
    for batch, micro_batch, layers in ((8, 2, 1), (8, 8, 1), (4, 1, 2), (6, 3, 1)):
        config = GPTConfig(vocab_size=256, context_length=64, layers=layers, hidden=32, heads=2)
        model, tokens = GPT(config), torch.zeros(batch, 32, dtype=torch.int64)
        with memory.track(model) as t:
            mean_of_means(model, tokens, tokens, micro_batch)
        read = t.peak["gradients"] + t.peak["activations"]
        said = predict(config, batch, micro_batch, 32)
        if not isinstance(said, (int, float)):
            return f"expected the sum of both in bytes, or a Ledger; you say {said!r}"
        if not abs(said - read) <= 4:  # a 4-byte number of targets may still be there, or not
            return (f"{batch} rows by {micro_batch}, {layers} layer{'s' * (layers > 1)}: you say {said:,}, the "
                    f"tracker reads {read:,} bytes")
    return None


@exercise("parity and bytes")
def third(step):
    """Grade `step(model, tokens, targets, micro_batch)`, which does what the first one does, for a model in bf16 and
    rows of equal length. It sums in fp32 and leaves bf16 in `.grad`. During a backward, the bf16 gradients of at most
    one layer exist beside the sums."""
    torch.manual_seed(0)
    model, tokens = GPT(CONFIG, dtype=torch.bfloat16), torch.randint(0, 256, (64, 8))
    exact = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in model.parameters()]
    for part in tokens:
        for total, gradient in zip(exact, _gradients(model, part[None], part[None]), strict=True):
            total += gradient.double() / len(tokens)
        model.zero_grad()
    before = [dict(parameter._post_accumulate_grad_hooks or {}) for parameter in model.parameters()]
    with memory.track(model, tokens) as t:
        step(model, tokens, tokens, 1)
    if [dict(parameter._post_accumulate_grad_hooks or {}) for parameter in model.parameters()] != before:
        return "hooks of yours are left on the parameters: remove() them"
    apart = _distance(model, exact)
    if apart is None:
        return "a parameter has no gradient"
    if not apart <= 2**-8:
        return f"summed in fp32 the gradient is within {2**-8:.2%} of the exact sum, yours is off by {apart:.2%}"
    if not all(parameter.grad.dtype is torch.bfloat16 for parameter in model.parameters()):
        return f"the sum is right, but `.grad` is left in {next(model.parameters()).grad.dtype}, not in bf16"
    count = CONFIG.parameter_count()
    layer = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    columns = [t.timeline.categories.index(name) for name in ("gradients", "temporaries")]
    backward = [op.phase == "backward" for op in t.timeline.ops]
    held = t.timeline.nbytes[backward][:, columns].sum(axis=1).max()
    limit = 4 * count + (2 + 4) * layer
    return None if held <= limit + count else (  # allowed for temporaries: half the bytes of all bf16 gradients
        f"the gradient is right, but sums and gradients were {held:,} bytes in a backward; fp32 sums and the "
        f"gradients of the largest layer, in bf16 and fp32, are {limit:,}")
