"""Right answers pass, wrong and unanswered ones do not."""

import math
import re
from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import where_the_memory_goes as page
from refimpl.memory import model_state_bytes
from refimpl.model import GPT

# --- first -----------------------------------------------------------------------------------------------------------


def states(config):
    tensors = len(list(GPT(config).parameters()))
    return model_state_bytes(config.parameter_count(), tensors=tensors).total


def states_by_hand(config):
    weight_gradient_moments = 4 + 4 + 2 * 4
    return sum(weight_gradient_moments * p.numel() + 4 for p in GPT(config).parameters())


def states_of_a_step(config):
    """Makes a step on gradients of ones, and asks the optimizer."""
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    held = [each for state in optimizer.state.values() for each in state.values()]
    return float(sum(x.nbytes for p in model.parameters() for x in (p, p.grad)) + sum(x.nbytes for x in held))


def states_as_a_ledger(config):
    return model_state_bytes(config.parameter_count(), tensors=len(list(GPT(config).parameters())))


def of_each_name(config):
    """Counts a tied weight twice."""
    return sum(16 * p.numel() + 4 for p in GPT(config).state_dict().values())


# --- second ----------------------------------------------------------------------------------------------------------


def evaluate(model, tokens, targets):
    with torch.no_grad():
        return model(tokens, targets)


@torch.inference_mode()
def evaluate_by_hand(model, tokens, targets):
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def evaluate_each_text(model, tokens, targets):
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    losses = [model(x, y) for x, y in zip(tokens.split(1), targets.split(1), strict=True)]
    torch.set_grad_enabled(before)
    return torch.stack(losses).mean()


def evaluate_frozen(model, tokens, targets):
    model.requires_grad_(False)
    return model(tokens, targets)


def evaluate_in_eval_mode(model, tokens, targets):
    return evaluate(model.eval(), tokens, targets)


def evaluate_and_train(model, tokens, targets):
    loss = evaluate_in_eval_mode(model, tokens, targets)
    model.train()
    return loss


def evaluate_of(reduction, model, tokens, targets):
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction=reduction)


def evaluate_for_ever(model, tokens, targets):
    torch.set_grad_enabled(False)
    return model(tokens, targets)


def evaluate_late(model, tokens, targets):
    logits = model(tokens)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- third -----------------------------------------------------------------------------------------------------------


def lean_step(model, optimizer, tokens, targets):
    loss = model(tokens, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def lean_step_that_forgets_first(model, optimizer, tokens, targets):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss.item()


def lean_step_by_grad(model, optimizer, tokens, targets):
    parameters = list(model.parameters())
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    del logits
    for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = gradient
    del gradient
    optimizer.step()
    for p in parameters:
        p.grad = None
    return loss


def step_with_fault(model, optimizer, tokens, targets, *, none=True, zero=True, step=1, named=False):
    if named:
        logits = model(tokens)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    else:
        loss = model(tokens, targets)
    loss.backward()
    for _ in range(step):
        optimizer.step()
    if zero:
        optimizer.zero_grad(set_to_none=none)
    return loss.detach()


def step_of_half_the_texts(model, optimizer, tokens, targets):
    loss = lean_step(model, optimizer, tokens[:2], targets[:2])
    return (loss + evaluate(model, tokens[2:], targets[2:])) / 2


def step_without_an_update(model, optimizer, tokens, targets):
    return evaluate(model, tokens, targets)


def step_by_sgd(model, optimizer, tokens, targets):
    loss = model(tokens, targets)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 1e-3 * p.grad
            p.grad = None
    return loss.detach()


class SpoilsTheWeights:
    """The second step's loss is right; then one weight is not."""

    def __init__(self, factor):
        self.factor, self.calls = factor, 0

    def __call__(self, model, *rest):
        loss = lean_step(model, *rest)
        self.calls += 1
        if self.calls == 2:
            with torch.no_grad():
                model.norm.weight.mul_(self.factor)
        return loss


def step_that_keeps_its_loss(model, optimizer, tokens, targets, kept=[]):  # noqa: B006 - as a reader may write it
    logits = model(tokens)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    kept.append(logits)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


ANSWERS = {
    page.first: Answers(
        right=[states, states_by_hand, states_of_a_step, states_as_a_ledger],
        wrong=[
            (lambda config: math.nan, "you say nan, the tracker reads"),
            (lambda config: "16 bytes", "expected a number, you return '16 bytes'"),
            (lambda config: states(config) - 4, "the step counters is right: you have 15, this model has 16 tensors"),
            (lambda config: states(config) - 2, re.compile("the tracker reads [0-9,]* bytes$")),
            (lambda config: model_state_bytes(config.parameter_count()), "the step counters are missing, 4 bytes"),
            (lambda config: 16 * config.parameter_count(), "the step counters are missing, 4 bytes for each tensor"),
            (lambda config: 12 * config.parameter_count(), re.compile("the tracker reads [0-9,]* bytes$")),
            (lambda config: states(config) // 2, "the tracker reads"),
            (lambda config: states(config) / 2**20, "the tracker reads"),
            (lambda config: 16 * config.parameter_count() + 4, "you have 1, this model has 16 tensors"),
            (lambda config: 16 * config.parameter_count() + 4 * len(list(GPT(page.CONFIGS[0]).parameters())),
             "for GPTConfig(vocab_size=300"),
            (lambda config: 16 * config.parameter_count() + 4 * (4 + 12 * config.layers),
             re.compile(r"vocab_size=300.*you have 40, this model has 22 tensors")),
            (lambda config: 16 * config.parameter_count() + 4000, re.compile("the tracker reads [0-9,]* bytes$")),
            (of_each_name, "the tracker reads"),
            (lambda config: sum(p.nbytes for p in GPT(config).parameters()), "the tracker reads")],
    ),
    page.second: Answers(
        right=[evaluate, evaluate_by_hand, evaluate_each_text, evaluate_and_train],
        wrong=[
            (lambda model, tokens, targets: math.nan, "you return nan"),
            (lambda model, tokens, targets: evaluate(model, tokens, targets) * math.nan, "you return nan"),
            (lambda model, tokens, targets: evaluate(model, tokens, targets).expand(2), "expected a number, or a"),
            (partial(evaluate_of, "sum"), "the loss is 5."),
            (partial(evaluate_of, "none"), "expected a number, or a tensor of one"),
            (lambda model, tokens, targets: evaluate(model, tokens[:1], targets[:1]), "the loss is 5."),
            (lambda model, tokens, targets: evaluate(model, tokens, tokens), "the loss is 5."),
            (lambda model, tokens, targets: evaluate(model, tokens, targets).exp(), "the loss is 5."),
            (lambda model, tokens, targets: 1.0, "you return 1.000000"),
            (evaluate_frozen, "parameters need no gradient any more"),
            (evaluate_in_eval_mode, "right, but the model is left in eval mode"),
            (evaluate_for_ever, "your function changes whether torch makes graphs"),
            (evaluate_late, "bytes of activations were kept"),
            (lambda model, tokens, targets: model(tokens, targets).detach(), "bytes of activations were kept"),
            (lambda model, tokens, targets: model.eval()(tokens, targets).item(), "bytes of activations were kept")],
        saves_nothing=(lambda model, tokens, targets: model(tokens, targets), "bytes of activations were kept"),
    ),
    page.third: Answers(
        right=[lean_step, lean_step_that_forgets_first, lean_step_by_grad],
        wrong=[
            (lambda *args: lean_step(*args) * math.nan, "yours is nan"),
            (SpoilsTheWeights(math.nan), "the loss is right, but the weights after two steps"),
            (SpoilsTheWeights(1.01), "the loss is right, but the weights after two steps"),
            (lambda *args: [lean_step(*args), lean_step(*args), evaluate(args[0], *args[2:])][2], "loss is"),
            (partial(step_with_fault, zero=False), "the loss is right, but the weights after two steps"),
            (partial(step_with_fault, step=0), "the second step's loss is"),
            (partial(step_with_fault, step=2), "the second step's loss is"),
            (step_without_an_update, "the second step's loss is"),
            (step_by_sgd, "the second step's loss is"),
            (step_of_half_the_texts, "the second step's loss is"),
            (partial(step_with_fault, none=False), "can be had"),
            (partial(step_with_fault, named=True), "can be had"),
            (partial(step_with_fault, named=True, none=False), "can be had"),
            (step_that_keeps_its_loss, "can be had")],
        saves_nothing=(page.wasteful_step, "the weights are right; the peak is 0 bytes lower"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
