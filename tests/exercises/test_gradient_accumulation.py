"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import gradient_accumulation as page
from refimpl import memory
from refimpl.accumulation import accumulate


def parts(tokens, targets, micro_batch):
    return zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True)


def step(model, tokens, targets, micro_batch):
    n = (targets != -100).sum()
    for x, y in parts(tokens, targets, micro_batch):
        if (y != -100).any():
            (model(x, y) * (y != -100).sum() / n).backward()
    return True


def losses_kept(model, tokens, targets, micro_batch):
    n = (targets != -100).sum()
    sum(model(x, y) * (y != -100).sum() / n for x, y in parts(tokens, targets, micro_batch)).backward()
    return True


def predict(config, effective_batch, micro_batch, sequence, always=False):
    gradients = 4 * config.parameter_count() if always or micro_batch < effective_batch else 0
    return gradients + memory.activation_bytes(config, micro_batch, sequence)


def sum_in_fp32(model, tokens, targets, micro_batch, remove=True):
    sums = {}

    def add(parameter):
        gradient, parameter.grad = parameter.grad, None
        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient.float()

    hooks = [parameter.register_post_accumulate_grad_hook(add) for parameter in model.parameters()]
    for x, y in parts(tokens, targets, micro_batch):
        (model(x, y) * micro_batch / len(tokens)).backward()
    for hook in hooks if remove else ():
        hook.remove()
    while sums:
        parameter, total = sums.popitem()
        parameter.grad = total.to(parameter.dtype)
    return True


def sum_after_each_backward(model, tokens, targets, micro_batch):
    sums = [0.0 for _ in model.parameters()]
    for x, y in parts(tokens, targets, micro_batch):
        (model(x, y) * micro_batch / len(tokens)).backward()
        sums = [total + parameter.grad.float() for total, parameter in zip(sums, model.parameters(), strict=True)]
        model.zero_grad()
    for total, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad = total.to(parameter.dtype)
    return True


def mean_of_means(*arguments):
    page.mean_of_means(*arguments)
    return True


def by_accumulate(model, tokens, targets, micro_batch):
    return accumulate(model, tokens, targets, micro_batch=micro_batch)


def in_grad_of_fp32(model, tokens, targets, micro_batch, leave=False):
    """autograd sums in fp32 itself."""
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    for x, y in parts(tokens, targets, micro_batch):
        (model(x, y) * micro_batch / len(tokens)).backward()
    for parameter in () if leave else model.parameters():
        total, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.bfloat16
        parameter.grad = total.bfloat16()
    return True


ANSWERS = {
    page.first: Answers(
        right=[step],
        wrong=[
            (mean_of_means, "the gradient of the whole batch is another one"),
            (losses_kept, "6 more rows raise the peak by"),
            (lambda *_: True, "a parameter has no gradient")],
    ),
    page.second: Answers(
        right=[predict],
        wrong=[
            (partial(predict, always=True), "8 rows by 8, 1 layer: you say"),
            (lambda *_: (1, 2), "expected the sum of both in bytes")],
    ),
    page.third: Answers(
        right=[sum_in_fp32, by_accumulate, in_grad_of_fp32],
        wrong=[
            (mean_of_means, "summed in fp32 the gradient is within"),
            (sum_after_each_backward, "bytes in a backward; fp32 sums and the"),
            (partial(in_grad_of_fp32, leave=True), "`.grad` is left in torch.float32, not in bf16"),
            (partial(sum_in_fp32, remove=False), "hooks of yours are left"),
            (lambda *_: True, "a parameter has no gradient")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
