"""What the page *Mixed precision* has its readers build."""

import math

import torch

from exercises import close, readable
from exercises.asking import ANYTHING
from refimpl import memory

from . import blank

HINTS = {
    "make_masters": [
        "First copy: `w.detach().clone()` is the fp32 master of a weight `w`. An optimizer needs `.requires_grad_()` "
        "of it.",
        "Then narrow: `w.data = w.data.to(dtype)` frees the fp32 weight, and the model keeps the same parameter."],
    "step_on_masters": [
        "Before the step: `master.grad = w.grad.float()`, and `w.grad = None` to free the 16-bit gradient.",
        "`optimizer` already has the masters, so `optimizer.step()` updates them.",
        "After the step: `w.data.copy_(master.data)` rounds a master into its weight. Set `master.grad = None`, too."],
    "step_scaled": [
        "`p.grad.isfinite().all()` is False if a gradient has an inf or a NaN. Ask every parameter first.",
        "If one is not finite, return `scale / 2` at once. Else divide every `p.grad` by `scale`, call "
        "`optimizer.step()`, and return `scale`."]}


def make_masters(model, dtype):
    """Round the fp32 weights of `model` to `dtype`, a 16-bit format, in place. Return their masters: a list of fp32
    copies of `model.parameters()` as they were, in that order, which require gradients, so that an optimizer can update
    them.
    """
    masters = [w.detach().clone().requires_grad_() for w in model.parameters()]
    for w in model.parameters():
        w.data = w.data.to(dtype)  # the fp32 weight is freed
    return masters


def _small_model():
    """Return a model whose weights are near 1, where bf16 has neighbours 0.008 apart."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(70, 50), torch.nn.Linear(50, 30))
    for parameter in model.parameters():
        parameter.data += 1
    return model


@blank(make_masters, "parity and bytes", [torch.Tensor])
def check_make_masters(make_masters):
    """Compare weights, masters and bytes."""
    for dtype in (torch.bfloat16, torch.float16):
        model, weights = _small_model(), [p.detach().clone() for p in _small_model().parameters()]
        with memory.track(model) as t:
            masters = make_masters(model, dtype)
        if len(masters) != len(weights):
            return f"expected a master for each of {len(weights)} parameters, you return {len(masters)}"
        for w, master, before in zip(model.parameters(), masters, weights, strict=True):
            if w.dtype is not dtype:
                return f"after make_masters(model, {dtype}) a weight is in {w.dtype}"
            if not readable(w) or not torch.equal(w.detach(), before.to(dtype)):
                return "a weight is not the former weight, rounded"
            rounded = before.to(dtype).float()
            if master.dtype is torch.float32 and readable(master) and torch.equal(master.detach(), rounded):
                return "a master is the 16-bit weight, widened: copy the fp32 weight before you round it"
            if not close(master, before) or not torch.equal(master.detach(), before):
                return (f"expected the former weight, in {before.dtype} and {tuple(before.shape)}; you return a master "
                        f"in {master.dtype} and {tuple(master.shape)}, and it has other numbers or another form")
            if not (master.is_leaf and master.requires_grad):
                return "an optimizer takes no such master: expected a leaf that requires a gradient"
        grown, more = t.now.total - t.start.total, 2 * sum(w.numel() for w in weights)
        if grown > more:
            return f"right, but it takes {grown:,} bytes more than the fp32 weights alone; 2 a parameter are {more:,}"
    return None


def step_on_masters(model, masters, optimizer):
    """Step once, in place of `optimizer.step()`. The gradients of `model`, in 16 bits, go to `masters` in fp32. Then
    `optimizer`, which has the masters, steps. Each weight becomes its master, rounded. No gradient is left.
    """
    for w, master in zip(model.parameters(), masters, strict=True):
        master.grad, w.grad = w.grad.float(), None
    optimizer.step()
    for w, master in zip(model.parameters(), masters, strict=True):
        w.data.copy_(master.data)  # rounds
        master.grad = None


@blank(step_on_masters, "parity and bytes", ANYTHING)
def check_step_on_masters(step_on_masters):
    """Compare weights and masters after each of many small steps, and the bytes that stay, with those of SGD."""
    model, alone = _small_model(), _small_model()
    masters = make_masters(model, torch.bfloat16)
    optimizer, expected = (torch.optim.SGD(each, lr=0.01, momentum=0.9) for each in (masters, alone.parameters()))
    with memory.track(model, masters, *alone.parameters()) as t:
        for number in range(1, 21):
            for w, p in zip(model.parameters(), alone.parameters(), strict=True):
                w.grad = 0.01 * torch.randn_like(w) + 0.005
                p.grad = w.grad.float()
            step_on_masters(model, masters, optimizer)
            expected.step()
            for w, master, p in zip(model.parameters(), masters, alone.parameters(), strict=True):
                if master.dtype is not torch.float32 or w.dtype is not torch.bfloat16:
                    return f"a weight is in {w.dtype} and its master in {master.dtype}: expected bfloat16 and float32"
                if not readable(w) or not readable(master):
                    return "the storage of a weight or of a master was freed: expected both to stay"
                if not torch.allclose(master.detach(), p.detach(), rtol=0, atol=1e-6):
                    return f"after step {number} a master is not what SGD makes of it: expected one step in fp32"
                if not torch.equal(w.detach(), master.detach().bfloat16()):
                    return f"the masters are right, but after step {number} a weight is not its master, rounded"
        expected.zero_grad()
        del expected
    if any(each.grad is not None for each in (*model.parameters(), *masters)):
        return "weights and masters are right, but a `.grad` is left: set it to None, of weights and of masters"
    count = sum(master.numel() for master in masters)
    stays = t.now.total - t.start.total
    if stays > 4 * count:
        return f"right, but {stays:,} bytes more stay after {number} steps; the momentum takes {4 * count:,}"
    return None


def step_scaled(model, optimizer, scale):
    """Step after the backward of `scale` times the loss; gradients are in fp32. Return the scale of the next step.

    If all gradients are finite: divide them by `scale`, step, return `scale`. Else do not step, and return half of
    `scale` (a number, perhaps below 1).
    """
    if not all(p.grad.isfinite().all() for p in model.parameters()):
        return scale / 2
    for p in model.parameters():
        p.grad /= scale
    optimizer.step()
    return scale


@blank(step_scaled, "the weights and the scale", float)
def check_step_scaled(step_scaled):
    """Compare weights and scales over steps with and without an overflow."""
    model, alone = _small_model(), _small_model()
    optimizer, expected = (torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, alone))
    cases = (None, 0), (math.inf, 0), (None, 0), (math.nan, 1), (-math.inf, 3)  # what; in which gradient
    for scale in (1024.0, 2.0**15, 1.0):
        for bad, place in cases:
            for number, (p, q) in enumerate(zip(model.parameters(), alone.parameters(), strict=True)):
                q.grad = torch.randn_like(q)
                p.grad = q.grad * scale
                if bad is not None and number == place:
                    p.grad[-1] = bad
            said, wanted = step_scaled(model, optimizer, scale), scale if bad is None else scale / 2
            case = "where all gradients are finite" if bad is None else f"where a gradient is {bad}"
            if bad is None:
                expected.step()
            if not all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), alone.parameters(),
                                                                        strict=True)):
                return f"{case}, with scale {scale:g}: the weights are other than after " + (
                    "a step with gradients divided by the scale" if bad is None else "no step")
            if said != wanted:
                return f"{case}, you return {said:g}: expected {wanted:g}, as scale was {scale:g}"
    return None
