"""Right answers pass, wrong and unanswered ones do not."""

import torch
from exercises_kit import Answers, graded
from torch.autograd.graph import saved_tensors_hooks

from exercises import recomputation as page
from refimpl import memory
from refimpl.checkpointing import kept_bytes, recompute


def predict(config, batch, sequence):
    return kept_bytes(config, batch, sequence, [(i,) for i in range(config.layers)])


def once_more(fn, x):
    slots, again = [], []

    def pack(tensor):
        slots.append(len(slots))
        return slots[-1]

    def unpack(index):
        if not again:
            with torch.enable_grad(), saved_tensors_hooks(lambda t: again.append(t.detach()), lambda t: t):
                fn(x.detach().requires_grad_())
        return again[index]

    with saved_tensors_hooks(pack, unpack):
        return fn(x)


def every_block(model):
    recompute(model.blocks)
    return True


def only_linears(model):
    page.saves_nothing(model)
    return True


def zeroed(model):
    torch.nn.init.zeros_(model.head.weight)
    return True


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (memory.activation_bytes, "the tracker reads")],
    ),
    page.second: Answers(
        right=[once_more],
        wrong=[
            (lambda fn, x: fn(x), "bytes are kept besides x"),
            (lambda fn, x: fn(x) + 1, "the output is not"),
            (lambda fn, x: fn(x.detach().requires_grad_()).detach() * x.sum() / x.sum(), "not")],
    ),
    page.third: Answers(
        right=[every_block],
        wrong=[
            (only_linears, "expected below 0.6"),
            (zeroed, "the gradients have changed")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
