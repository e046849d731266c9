"""Right answers pass, wrong and unanswered ones do not."""

import re
from functools import partial

import torch
from exercises_kit import Answers, graded
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from exercises import recomputation as page
from refimpl import memory
from refimpl.checkpointing import DynamicCheckpoint, PlannedBlocks, checkpoint, kept_bytes, recompute
from refimpl.papers import recomputation as paper

# --- first -----------------------------------------------------------------------------------------------------------


def predict(config, batch, sequence):
    terms = memory.activation_terms(config, batch, sequence)
    around = sum(terms.values()) - terms["blocks"]
    return around + config.layers * 4 * batch * sequence * config.hidden


def predict_by_kept_bytes(config, batch, sequence):
    return kept_bytes(config, batch, sequence, [(i,) for i in range(config.layers)])


def predict_by_hand(config, batch, sequence):
    token = batch * sequence
    positions = 8 * sequence if config.positions == "learned" else 8 * sequence * (config.hidden // config.heads)
    statistics = 8 if config.norm == "layernorm" else 4  # for each token
    inputs = config.layers + 1 + 1  # of the blocks, the last norm, the head
    inputs += config.norm == "rmsnorm"  # which also keeps what it multiplies by its weight
    return token * (4 * inputs * config.hidden + statistics + 4 * config.vocab_size) + positions + 4


def kept(config, batch, sequence, *, e=4, blocks=None, without=()):
    terms = memory.activation_terms(config, batch, sequence)
    around = sum(n for name, n in terms.items() if name not in ("blocks", *without))
    return around + (config.layers if blocks is None else blocks) * e * batch * sequence * config.hidden


def kept_by_context(config, batch, sequence):
    return kept(config, batch, config.context_length)


# --- second ----------------------------------------------------------------------------------------------------------


def once_more(fn, x):
    numbers, tensors = [], []

    def pack(tensor):
        numbers.append(len(numbers))
        return numbers[-1]

    def keep(tensor):
        tensors.append(tensor.detach())

    def unpack(number):
        if not tensors:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda nothing: nothing):
                fn(x.detach().requires_grad_(x.requires_grad))
        return tensors[number]

    with saved_tensors_hooks(pack, unpack):
        return fn(x)


class Placeholder:
    tensor = None


def once_more_by_placeholders(fn, x):
    places = []

    def place(tensor):
        places.append(Placeholder())
        return places[-1]

    def open_(placeholder):
        if placeholder.tensor is None:
            again = iter(places)

            def fill(tensor):
                next(again).tensor = tensor.detach()

            copy = x.detach()
            copy.requires_grad = x.requires_grad
            with torch.enable_grad(), saved_tensors_hooks(fill, lambda nothing: nothing):
                fn(copy)
        tensor, placeholder.tensor = placeholder.tensor, None
        return tensor

    with saved_tensors_hooks(place, open_):
        return fn(x)


def once_more_by_torch(fn, x):
    return torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)


def hooked(fn, x, *, wants=None, again=None, times=1, grad=True, keep=None, offset=0, late=False):
    numbers, tensors = [], [] if keep is None else keep
    tensors.clear() if keep is None else None

    def pack(tensor):
        numbers.append(len(numbers))
        return numbers[-1]

    def unpack(number):
        if times is None:
            tensors.clear()
        if not tensors:
            copy = x.detach().requires_grad_(x.requires_grad if wants is None else wants)
            with torch.set_grad_enabled(grad), saved_tensors_hooks(lambda t: tensors.append(t.detach()), lambda n: n):
                (again or fn)(copy)
        return tensors[number + offset]

    with saved_tensors_hooks(pack, unpack):
        return fn(x)


KEPT = []


def in_a_global(fn, x):
    KEPT.append([])
    return hooked(fn, x, keep=KEPT[-1])


def by_the_papers_function(fn, x):
    return paper.checkpoint(fn, x)


def through_numpy(fn, x):
    with saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
        return fn(x)


def in_16_bits(fn, x):
    with saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        return fn(x)


def in_order(fn, x):
    """Takes tensors from the front, in the order of forward; backward asks for the last first."""
    tensors = []

    def unpack(_):
        if not tensors:
            with torch.enable_grad(), saved_tensors_hooks(lambda t: tensors.append(t.detach()), lambda n: n):
                fn(x.detach().requires_grad_(x.requires_grad))
        return tensors.pop(0)

    with saved_tensors_hooks(lambda t: None, unpack):
        return fn(x)


def without_graph(fn, x):
    with torch.no_grad():
        return fn(x)


def freed(fn, x):
    y = once_more(fn, x)
    y.untyped_storage().resize_(0)
    return y


# --- third -----------------------------------------------------------------------------------------------------------


def every_block(model):
    recompute(model.blocks)
    return model


def by_plan(model):
    model.blocks = PlannedBlocks(model.blocks, [(i,) for i in range(len(model.blocks))])
    return model


def by_torch(model):
    for block in model.blocks:
        block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    return model


def one_region(model):
    recompute([model])
    return model


def for_a_moment(model):
    with recompute(model.blocks):
        return model


def one_block(model):
    DynamicCheckpoint(model.blocks, end_layer=1)
    return model


def by_the_paper(model):
    """Draws other dropout masks in the second forward."""
    for block in model.blocks:
        block.forward = lambda x, rotation, forward=block.forward: paper.checkpoint(lambda x: forward(x, rotation), x)
    return model


def without_rotation(model):
    """The same random numbers in both forwards, but each block is given x alone, as the page's `by` does it."""
    for block in model.blocks:
        block.forward = lambda x, *rest, forward=block.forward: checkpoint(forward, x)
    return model


def zeroed(model):
    torch.nn.init.zeros_(model.head.weight)
    return every_block(model)


def frozen(model):
    for parameter in model.blocks.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return model


def without_graphs(model):
    for block in model.blocks:
        block.forward = torch.no_grad()(block.forward)
    return model


def in_bf16(model):
    model = every_block(model).bfloat16()
    return model


def without_dropout(model):
    return every_block(model).eval()


def wrapped(model):
    recompute(model.blocks)

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens, targets):
            return self.model(tokens, targets)

    return Wrapper()


def broken(model):
    for block in model.blocks:
        block.forward = partial(paper.checkpoint, block)  # calls itself
    return model


def fewer_blocks(model):
    model.blocks = model.blocks[:1]
    return model


ANSWERS = {
    page.first: Answers(
        right=[predict, predict_by_kept_bytes, predict_by_hand],
        wrong=[
            (memory.activation_bytes, "the tracker reads"),
            (partial(kept, e=2), "3 layers of 32, 2 x 64 tokens, layernorm, learned positions: you say"),
            (partial(kept, e=1), "the tracker reads"),
            (partial(kept, blocks=1), "the tracker reads"),
            (partial(kept, blocks=3), "5 layers of 48, 3 x 40 tokens, rmsnorm, rotary positions: you say"),
            (partial(kept, without=["positions"]), "learned positions: you say"),
            (partial(kept, without=["rotation"]), "rotary positions: you say"),
            (partial(kept, without=["loss weight"]), "the tracker reads"),
            (kept_by_context, "the tracker reads"),
            (lambda config, batch, sequence: predict(config, 2, sequence), "3 x 40 tokens"),
            (lambda config, batch, sequence: config.layers * 4 * batch * sequence * config.hidden, "you say 49,152,"),
            (lambda *given: float("nan"), "you say nan")],
    ),
    page.second: Answers(
        right=[once_more, once_more_by_placeholders, once_more_by_torch],
        wrong=[
            (partial(hooked, wants=True), "x.requires_grad is False: in backward"),
            (partial(hooked, wants=False), "x.requires_grad is True: in backward"),
            (partial(hooked, grad=False), "in backward your function raises IndexError"),
            (partial(hooked, offset=-1), "your function raises"),
            (partial(hooked, times=None), "fn runs 12 times: expected 2"),
            (in_a_global, "bytes are still there after backward"),
            (in_order, "your function raises RuntimeError"),
            (by_the_papers_function, "your function raises RuntimeError"),
            (through_numpy, "fn runs 1 times: expected 2"),
            (in_16_bits, "the gradients are not those of fn(x)"),
            (without_graph, "the output is right, but has no graph"),
            (lambda fn, x: fn(x) + 1, "the output is not fn(x)"),
            (lambda fn, x: once_more(fn, x).T, "the output is not fn(x)"),
            (lambda fn, x: fn(x.detach().requires_grad_(x.requires_grad)), "your function raises RuntimeError"),
            (freed, "the output is not fn(x)"),
            (lambda fn, x: once_more(fn, fn(x)), "the output is not fn(x)")],
        saves_nothing=(lambda fn, x: fn(x), "bytes are kept besides x and the output"),
    ),
    page.third: Answers(
        right=[every_block, by_plan, by_torch],
        wrong=[
            (lambda model: model, "the peak is 1.000 of what it was"),
            (one_region, "3 blocks with dropout 0.0: the gradients are right, but the peak is"),
            (for_a_moment, "the peak is 1.000 of what it was"),
            (one_block, "the gradients are right, but the peak is"),
            (by_the_paper, "5 blocks with dropout 0.1, each called with x and the rotation of positions: the grad"),
            (without_rotation, "each called with x and the rotation of positions: the gradients have changed"),
            (without_dropout, re.compile("5 blocks with dropout 0.1.*: the gradients have changed")),
            (zeroed, "the gradients have changed"),
            (frozen, "the gradients have changed"),
            (without_graphs, "the gradients have changed"),
            (in_bf16, "the gradients have changed"),
            (wrapped, "the parameters have other names"),
            (fewer_blocks, "the parameters have other names"),
            (broken, "your function raises RecursionError"),
            (lambda model: bool(every_block(model)), "expected a Module, you return True")],
        saves_nothing=(page.saves_nothing, "the gradients are right, but the peak is"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
