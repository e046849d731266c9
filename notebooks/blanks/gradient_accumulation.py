"""What the page *Gradient accumulation* has its readers build."""

import torch

from exercises import SCALAR, close
from exercises.asking import ANYTHING
from exercises.gradient_accumulation import forwards, fresh_model, gradient_fault, loss_fault
from refimpl import memory

from . import blank

HINTS = {
    "in_parts": [
        "`tokens.split(micro_batch)` and `targets.split(micro_batch)` cut the rows. `zip` gives both parts at once.",
        "`model(x, y)` is the mean loss of a part. In the mean of the whole batch it counts for its rows divided by "
        "all rows: multiply by `len(x) / len(tokens)`.",
        "Call `backward()` of that product in the loop, so that its activations are freed before the next part. Then "
        "add `.detach()` of it to the loss that you return."],
    "to_sum": [
        "Take the gradient and free its place: `gradient, parameter.grad = parameter.grad, None`.",
        "The first time `sums[parameter]` is `gradient.float()`, a copy in 32 bits; later it is "
        "`sums[parameter] += gradient`."]}


def in_parts(model, tokens, targets, micro_batch):
    """Leave the gradient of `model(tokens, targets)`, a mean loss, in `.grad` (None before). Return that loss without
    its graph. tokens, targets: (B, T) integers. A part has `micro_batch` rows; the last one may have fewer.
    """
    loss = 0.0
    for x, y in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
        part = model(x, y) * (len(x) / len(tokens))  # its share of the mean
        part.backward()  # adds to .grad, and frees this part's activations
        loss += part.detach()
    return loss


@blank(in_parts, "parity and bytes", SCALAR)
def check_in_parts(in_parts):
    """Compare gradient, loss, rows at a time and the growth of the peak with those of the whole batch."""
    peaks = {}
    for rows, micro_batch in ((6, 3), (12, 3), (7, 2)):
        model, tokens, targets = fresh_model(), *torch.randint(0, 256, (2, rows, 32))
        loss = model(tokens, targets)
        expected = torch.autograd.grad(loss, list(model.parameters()))
        said, t, most = forwards(in_parts, model, tokens, targets, micro_batch)
        case = f"{rows} rows by {micro_batch}"
        if wrong := gradient_fault(model, expected, 1e-5, case) or loss_fault(said, loss.item(), 1e-5):
            return wrong
        if most != micro_batch:
            return f"{case}: the gradient is right, but a forward had {most} rows"
        if isinstance(said, torch.Tensor) and said.requires_grad:
            return "gradient and loss are right, but the loss still has its graph: add up `.detach()` of each part"
        peaks[rows] = t.peak.total - t.start.total
    grown = peaks[12] - peaks[6]
    return None if grown < 4096 else f"the gradient is right, but 6 more rows raise the peak by {grown:,} bytes"


def to_sum(sums, parameter):
    """Add `parameter.grad`, in 16 bits, to `sums[parameter]`, in fp32, and set `.grad` to None.

    sums: a dict {parameter: sum}. It does not have the parameter at its first gradient.
    """
    gradient, parameter.grad = parameter.grad, None
    if parameter in sums:
        sums[parameter] += gradient
    else:
        sums[parameter] = gradient.float()


@blank(to_sum, "parity and bytes", ANYTHING)
def check_to_sum(to_sum):
    """Compare the sums of two parameters after each of several gradients, and the bytes that stay."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in ((300, 70), (50, 41))]
    gradients = [[torch.randn_like(parameter) for parameter in parameters] for _ in range(5)]
    exact, sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters], {}
    with memory.track(parameters, gradients, exact) as t:
        for number, each in enumerate(gradients, 1):
            for parameter, gradient, total in zip(parameters, each, exact, strict=True):
                parameter.grad = gradient.clone()
                total += gradient
                to_sum(sums, parameter)
                if wrong := _wrong_sum(sums.get(parameter), total):
                    return f"after gradient {number} of a parameter, {wrong}"
    if any(parameter.grad is not None for parameter in parameters):
        return "the sums are right, but `.grad` is not None in the end: it takes 2 bytes a parameter more"
    stays, needed = t.now.total - t.start.total, sum(4 * parameter.numel() for parameter in parameters)
    return None if stays <= needed else f"the sums are right, but {stays:,} bytes stay; the sums take {needed:,}"


def _wrong_sum(found, total):
    if not isinstance(found, torch.Tensor):
        return f"expected its sum in sums[parameter], which has {found!r}"
    if found.dtype is not torch.float32 or found.shape != total.shape:
        return (f"sums[parameter] is {found.dtype}, {tuple(found.shape)}: expected torch.float32, "
                f"{tuple(total.shape)}")
    return None if close(found, total) else "sums[parameter] is not the sum of its gradients: expected all of them"
