"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F

from exercises import gradient_accumulation as page
from refimpl import memory
from refimpl.accumulation import accumulate, accumulation_bytes

# --- first -----------------------------------------------------------------------------------------------------------


def step(model, tokens, targets, micro_batch):
    n, loss = (targets != -100).sum(), 0.0
    for x, y in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
        n_m = (y != -100).sum()
        if n_m > 0:
            part = model(x, y) * n_m / n
            part.backward()
            loss += part.detach()
    return loss


def sums_of_losses(model, tokens, targets, micro_batch):
    n, loss = (targets != -100).sum().item(), 0.0
    for start in range(0, len(tokens), micro_batch):
        rows = slice(start, start + micro_batch)
        part = model(tokens[rows], targets[rows], reduction="sum") / n
        part.backward()
        loss += part.item()
    return loss


def divided_in_the_end(model, tokens, targets, micro_batch):
    n, loss = 0, 0.0
    for x, y in parts(tokens, targets, micro_batch):
        part = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        part.backward()
        n, loss = n + y.ne(-100).sum(), loss + part.detach()
    for parameter in model.parameters():
        parameter.grad /= n
    return loss / n


def by_accumulate(model, tokens, targets, micro_batch):
    return accumulate(model, tokens, targets, micro_batch=micro_batch)


def parts(tokens, targets, micro_batch):
    return zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True)


def weighted(weight, model, tokens, targets, micro_batch, *, empty=False, last=True, first=True, tail=True):
    """An answer that weights each micro-batch by `weight(x, y, tokens, targets, number of them)`."""
    loss, all_parts = 0.0, list(parts(tokens, targets, micro_batch))
    for x, y in all_parts[not first:][:None if last else -1]:
        if (empty or (y != -100).any()) and (tail or len(x) == micro_batch):
            part = model(x, y) * weight(x, y, tokens, targets, len(all_parts))
            part.backward()
            loss += part.detach()
    return loss


def by_targets(x, y, tokens, targets, number):
    return (y != -100).sum() / (targets != -100).sum()


def by_rows(x, y, tokens, targets, number):
    return len(x) / len(tokens)


def losses_kept(model, tokens, targets, micro_batch):
    n = (targets != -100).sum()
    loss = sum(model(x, y, reduction="sum") / n for x, y in parts(tokens, targets, micro_batch))
    loss.backward()
    return loss.detach()


def in_fp64(model, tokens, targets, micro_batch):
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float64
    return step(model, tokens, targets, micro_batch)


def cleared_each_time(model, tokens, targets, micro_batch):
    n, loss = (targets != -100).sum(), 0.0
    for x, y in parts(tokens, targets, micro_batch):
        model.zero_grad()
        part = model(x, y, reduction="sum") / n
        part.backward()
        loss += part.detach()
    return loss


def freed(model, tokens, targets, micro_batch):
    loss = step(model, tokens, targets, micro_batch)
    model.norm.weight.grad.untyped_storage().resize_(0)
    return loss


def of_the_last(model, tokens, targets, micro_batch):
    step(model, tokens, targets, micro_batch)
    return model(tokens[-micro_batch:], targets[-micro_batch:]).detach()


# --- second ----------------------------------------------------------------------------------------------------------


def predict(config, effective_batch, micro_batch, sequence):
    gradients = 4 * config.parameter_count() if micro_batch < effective_batch else 0
    return gradients + memory.activation_bytes(config, micro_batch, sequence)


def as_a_ledger(config, effective_batch, micro_batch, sequence):
    activations = memory.activation_bytes(config, micro_batch, sequence)
    return accumulation_bytes(config.parameter_count(), activations, -(-effective_batch // micro_batch))


def by_terms(config, effective_batch, micro_batch, sequence):
    terms = sum(memory.activation_terms(config, micro_batch, sequence).values())
    return terms + sum(4 * p.numel() for p in page.GPT(config).parameters()) * (micro_batch != effective_batch)


def of_other_rows(rows, config, effective_batch, micro_batch, sequence):
    return predict(config, effective_batch, micro_batch, sequence) - memory.activation_bytes(
        config, micro_batch, sequence) + memory.activation_bytes(config, rows(effective_batch, micro_batch), sequence)


def gradients_always(config, effective_batch, micro_batch, sequence):
    return 4 * config.parameter_count() + memory.activation_bytes(config, micro_batch, sequence)


def with_temporaries(config, batch, rows, sequence):
    return predict(config, batch, rows, sequence) + 2 * 4 * rows * sequence * config.vocab_size


# --- third -----------------------------------------------------------------------------------------------------------


def low_precision_step(model, tokens, targets, micro_batch):
    sums, loss = {}, 0.0

    def add(parameter):
        gradient, parameter.grad = parameter.grad, None
        sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient.float()

    hooks = [parameter.register_post_accumulate_grad_hook(add) for parameter in model.parameters()]
    for x, y in zip(tokens.split(micro_batch), targets.split(micro_batch), strict=True):
        part = model(x, y) * len(x) / len(tokens)
        part.backward()
        loss += part.detach()
    for hook in hooks:
        hook.remove()
    for parameter, total in sums.items():
        parameter.grad = total.to(parameter.dtype)
    return loss


def in_grad_of_fp32(model, tokens, targets, micro_batch, leave=False):
    """autograd sums in fp32 itself."""
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    loss = weighted(by_rows, model, tokens, targets, micro_batch)
    for parameter in () if leave else model.parameters():
        total, parameter.grad = parameter.grad, None
        parameter.grad_dtype = torch.bfloat16
        parameter.grad = total.bfloat16()
    return loss


def summed(model, tokens, targets, micro_batch, *, remove=True, dtype=torch.float32, free=True, kept=lambda g: None,
           weight=by_rows, write=True, **options):
    """An answer with a fault."""
    sums, all_kept = {p: torch.zeros_like(p, dtype=dtype) for p in model.parameters()}, []

    def add(parameter):
        sums[parameter] += parameter.grad
        all_kept.append(kept(parameter.grad))
        if free:
            parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(add) for parameter in model.parameters()]
    loss = weighted(weight, model, tokens, targets, micro_batch, **options)
    for hook in hooks if remove else ():
        hook.remove()
    for parameter in model.parameters() if write else ():
        parameter.grad = sums[parameter].to(parameter.dtype)
    return loss


def sum_after_each_backward(model, tokens, targets, micro_batch):
    sums, loss = [0.0 for _ in model.parameters()], 0.0
    for x, y in parts(tokens, targets, micro_batch):
        part = model(x, y) * len(x) / len(tokens)
        part.backward()
        loss += part.detach()
        sums = [total + parameter.grad.float() for total, parameter in zip(sums, model.parameters(), strict=True)]
        model.zero_grad()
    for total, parameter in zip(sums, model.parameters(), strict=True):
        parameter.grad = total.to(parameter.dtype)
    return loss


def one(*given):
    return 1.0


ANSWERS = {
    page.first: Answers(
        right=[step, sums_of_losses, divided_in_the_end, by_accumulate],
        wrong=[
            (partial(weighted, lambda x, y, tokens, targets, number: 1 / number), "6 rows by 3: your gradient is off"),
            (partial(weighted, by_rows), "6 rows by 3: your gradient is off by"),
            (partial(weighted, one), "6 rows by 3: your gradient is off by"),
            (partial(weighted, by_targets, empty=True), "but you return NaN: a micro-batch without"),
            (partial(weighted, by_targets, last=False), "6 rows by 3: your gradient is off by"),
            (partial(weighted, by_targets, first=False), "6 rows by 3: your gradient is off by"),
            (partial(weighted, by_targets, tail=False), "7 rows by 2: your gradient is off by"),
            (partial(weighted, lambda *given: 4 * by_targets(*given)), "your gradient is 4 times what it has to be"),
            (lambda model, x, y, micro_batch: step(model, x, y, 3), "7 rows by 2: the gradient is right, but a forward "
             "had 3 rows"),
            (lambda model, x, y, micro_batch: step(model, x, y, 1), "6 rows by 3: the gradient is right, but a forward "
             "had 1 rows"),
            (lambda *given: step(*given) * 0 + 1, "but you return a loss of 1; that of the batch is"),
            (of_the_last, "the gradient is right, but you return a loss of"),
            (cleared_each_time, "6 rows by 3: your gradient is off by"),
            (freed, "a parameter has no gradient in the end"),
            (in_fp64, "the gradient is right, but in torch.float64"),
            (one, "a parameter has no gradient in the end")],
        saves_nothing=(losses_kept, "6 more rows raise the peak by"),
    ),
    page.second: Answers(
        right=[predict, as_a_ledger, by_terms],
        wrong=[
            (gradients_always, "8 rows of 32 tokens by 8, 1 layer: you say"),
            (lambda config, batch, rows, sequence: memory.activation_bytes(config, rows, sequence),
             "8 rows of 32 tokens by 2, 1 layer: you say"),
            (partial(of_other_rows, lambda batch, rows: batch), "8 rows of 32 tokens by 2, 1 layer: you say"),
            (partial(of_other_rows, lambda batch, rows: batch // -(-batch // rows)), "7 rows of 40 tokens by 3"),
            (partial(of_other_rows, lambda batch, rows: batch // rows), "8 rows of 32 tokens by 2, 1 layer: you say"),
            (lambda config, batch, rows, sequence: predict(config, batch, rows, 32), "4 rows of 24 tokens by 1"),
            (lambda config, *rest: predict(config, *rest) - 2 * config.parameter_count() * (rest[0] > rest[1]),
             "8 rows of 32 tokens by 2, 1 layer: you say"),
            (with_temporaries, "the gradients of logits and log-probabilities are temporaries: leave them out"),
            (lambda *given: (1, 2), "expected a number")],
    ),
    page.third: Answers(
        right=[low_precision_step, by_accumulate, in_grad_of_fp32, summed],
        wrong=[
            (partial(weighted, by_rows), "64 rows by 1: your gradient is off by"),
            (partial(summed, dtype=torch.bfloat16), "since a sum in bf16 loses small terms"),
            (partial(summed, free=False), "64 rows by 1: your gradient is"),
            (partial(summed, weight=lambda x, y, tokens, targets, number: 1 / number), "5 rows by 2: your gradient is"),
            (partial(summed, weight=one), "64 rows by 1: your gradient is 64 times what it has to be"),
            (partial(summed, last=False), "64 rows by 1: your gradient is off by"),
            (partial(summed, tail=False), "5 rows by 2: your gradient is"),
            (partial(summed, remove=False), "hooks of yours are left"),
            (partial(summed, write=False), "a parameter has no gradient in the end"),
            (partial(in_grad_of_fp32, leave=True), "`.grad` is left in torch.float32, not in bf16"),
            (lambda model, x, y, rows: summed(model, x, y, 1), "5 rows by 2"),
            (lambda *given: summed(*given) * 0 + 1, "but you return a loss of 1; that of the batch is"),
            (partial(summed, kept=lambda gradient: gradient), "bytes in a backward; fp32 sums and the"),
            (one, "a parameter has no gradient in the end")],
        saves_nothing=(sum_after_each_backward, "bytes in a backward; fp32 sums and the"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
