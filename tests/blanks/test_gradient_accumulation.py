"""Right functions pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F

from blanks import gradient_accumulation as page
from refimpl.accumulation import accumulate

# --- in_parts --------------------------------------------------------------------------------------------------------


def by_sums(model, tokens, targets, micro_batch):
    loss = 0.0
    for start in range(0, len(tokens), micro_batch):
        rows = slice(start, start + micro_batch)
        part = model(tokens[rows], targets[rows], reduction="sum") / targets.numel()
        part.backward()
        loss += part.item()
    return loss


def divided_in_the_end(model, tokens, targets, micro_batch):
    total = 0.0
    for x, y in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        loss.backward()
        total += loss.detach()
    for parameter in model.parameters():
        parameter.grad.div_(targets.numel())
    return total / targets.numel()


def by_accumulate(model, tokens, targets, micro_batch):
    return accumulate(model, tokens, targets, micro_batch=micro_batch)


def with_its_graph(model, tokens, targets, micro_batch):
    loss = 0.0
    for x, y in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
        part = model(x, y) * (len(x) / len(tokens))
        part.backward()
        loss = loss + part
    return loss


def parted(model, tokens, targets, micro_batch, *, weight=lambda x, tokens, number: len(x) / len(tokens), rows=None,
           among=slice(None), clear=False, last=False, returned=1.0):
    """in_parts with a fault."""
    parts = list(zip(tokens.split(rows or micro_batch), targets.split(rows or micro_batch), strict=True))
    loss = 0.0
    for x, y in parts[among]:
        if clear:
            model.zero_grad()
        part = model(x, y) * weight(x, tokens, len(parts))
        part.backward()
        loss = part.detach() if last else loss + part.detach()
    return loss * returned


def losses_first(model, tokens, targets, micro_batch):
    parts = zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True)
    loss = sum(model(x, y) * len(x) / len(tokens) for x, y in parts)
    loss.backward()
    return loss.detach()


def at_once(model, tokens, targets, micro_batch):
    loss = model(tokens, targets)
    loss.backward()
    return loss.detach()


def without_backward(model, tokens, targets, micro_batch):
    with torch.no_grad():
        return model(tokens, targets)


def without_the_tail(model, tokens, targets, micro_batch):
    whole = len(tokens) // micro_batch * micro_batch
    return page.in_parts(model, tokens[:whole], targets[:whole], micro_batch)


# --- to_sum ----------------------------------------------------------------------------------------------------------


def with_setdefault(sums, parameter):
    total = sums.setdefault(parameter, torch.zeros_like(parameter, dtype=torch.float32))
    total.add_(parameter.grad)
    parameter.grad = None


def out_of_place(sums, parameter):
    sums[parameter] = sums.get(parameter, 0.0) + parameter.grad.to(torch.float32)
    parameter.grad = None


def summed(sums, parameter, *, dtype=torch.float32, low=False, add=True, free=True, kept=None, store=True, end=1.0):
    """to_sum with a fault."""
    gradient = parameter.grad.to(dtype)
    total = sums[parameter] + gradient if add and parameter in sums else gradient
    if store:
        sums[parameter] = total.bfloat16().float() if low else total * end
    if kept is not None:
        sums.setdefault(kept, []).append(parameter.grad)
    if free:
        parameter.grad = None


def freed(sums, parameter):
    page.to_sum(sums, parameter)
    sums[parameter].untyped_storage().resize_(0)


ANSWERS = {
    page.check_in_parts: Answers(
        right=[page.in_parts, by_sums, divided_in_the_end, by_accumulate],
        wrong=[
            (partial(parted, weight=lambda *given: 1.0), "6 rows by 3: your gradient is 2 times what it has to be"),
            (partial(parted, weight=lambda x, tokens, number: 1 / number), "7 rows by 2: your gradient is off by"),
            (partial(parted, weight=lambda x, tokens, number: 1 / len(tokens)), "your gradient is 0.3333 times"),
            (partial(parted, weight=lambda x, tokens, number: len(x) // len(tokens)), "your gradient is 0 times"),
            (partial(parted, among=slice(1, None)), "6 rows by 3: your gradient is off by"),
            (partial(parted, among=slice(-1)), "6 rows by 3: your gradient is off by"),
            (without_the_tail, "7 rows by 2: your gradient is off by"),
            (partial(parted, clear=True), "6 rows by 3: your gradient is off by"),
            (partial(parted, last=True), "the gradient is right, but you return a loss of"),
            (partial(parted, returned=2.0), "the gradient is right, but you return a loss of"),
            (partial(parted, rows=1), "6 rows by 3: the gradient is right, but a forward had 1 rows"),
            (partial(parted, rows=3), "7 rows by 2: the gradient is right, but a forward had 3 rows"),
            (with_its_graph, "gradient and loss are right, but the loss still has its graph"),
            (at_once, "6 rows by 3: the gradient is right, but a forward had 6 rows"),
            (without_backward, "a parameter has no gradient in the end")],
        saves_nothing=(losses_first, "6 more rows raise the peak by"),
    ),
    page.check_to_sum: Answers(
        right=[page.to_sum, with_setdefault, out_of_place],
        wrong=[
            (partial(summed, dtype=torch.bfloat16), "sums[parameter] is torch.bfloat16, (300, 70): expected torch.fl"),
            (partial(summed, dtype=torch.float64), "is torch.float64, (300, 70): expected torch.float32"),
            (partial(summed, low=True), "after gradient 2 of a parameter, sums[parameter] is not the sum"),
            (partial(summed, add=False), "after gradient 2 of a parameter, sums[parameter] is not the sum"),
            (partial(summed, store=False), "after gradient 1 of a parameter, expected its sum in sums[parameter]"),
            (partial(summed, end=0.5), "after gradient 1 of a parameter, sums[parameter] is not the sum"),
            (partial(summed, free=False), "`.grad` is not None in the end: it takes 2 bytes a parameter more"),
            (lambda sums, parameter: sums.update({parameter: parameter.grad.flatten().float()}), "(21000,): expected"),
            (freed, "after gradient 1 of a parameter, sums[parameter] is not the sum")],
        saves_nothing=(partial(summed, kept="gradients"), "the sums are right, but 322,700 bytes stay"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
