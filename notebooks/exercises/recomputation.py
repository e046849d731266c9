"""Exercises of the page *Recomputation*."""

from dataclasses import replace

import torch

from refimpl import memory
from refimpl.checkpointing import recompute
from refimpl.model import GPT, GPTConfig

from . import close, exercise
from .asking import ANYTHING, Asked, Complaint

HINTS = {
    "first": [
        "`memory.activation_terms` gives {term: bytes} of a forward without recomputation. The term `blocks` counts "
        "all blocks together.",
        "Only the blocks keep less. Each keeps its input: `hidden` numbers of 4 bytes for each token.",
        "Add up all terms but `blocks`. Then add `config.layers * 4 * batch * sequence * config.hidden`."],
    "second": [
        "`with saved_tensors_hooks(pack, unpack):` calls `pack` with each tensor that autograd saves, and keeps what "
        "`pack` returns. Backward calls `unpack` with that, and takes the tensor that `unpack` returns.",
        "Let `pack` return a number: 0 for the first tensor, 1 for the next. Nothing else is kept.",
        "At the first call of `unpack`, run `fn` again under `torch.enable_grad()`, on "
        "`x.detach().requires_grad_(x.requires_grad)`, with other hooks that put `tensor.detach()` into a list. Each "
        "number finds its tensor in that list."],
    "third": [
        "A Linear keeps its input, and a region keeps its input: nothing is won. Which modules keep many tensors, and "
        "take only one?",
        "`exercise.saves_nothing` shows how `recompute` is called. Give it the blocks, and return the model."]}

CASES = (  # a sequence is shorter than the context
    (GPTConfig(vocab_size=256, context_length=96, layers=3, hidden=32, heads=4), 2, 64),
    (GPTConfig(vocab_size=128, context_length=128, layers=5, hidden=48, heads=4, activation="swiglu", norm="rmsnorm",
               positions="rotary"), 3, 40),
)


def _tokens(batch, sequence):
    return torch.randint(0, 128, (batch, sequence), generator=torch.Generator().manual_seed(1))


def _model(config):
    torch.manual_seed(0)
    model = GPT(config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


@exercise("bytes", int)
def first(predict):
    """Grade `predict(config, batch, sequence)`, which returns the bytes of activations after the forward when every
    block is recomputed."""
    for config, batch, sequence in CASES:
        model, tokens = _model(config), _tokens(batch, sequence)
        with recompute(model.blocks), memory.track(model, tokens) as t:
            loss = model(tokens, tokens)  # its graph holds what is kept
            kept = t.now["activations"]
        del loss
        said = predict(config, batch, sequence)
        if said != kept:
            return (f"{config.layers} layers of {config.hidden}, {batch} x {sequence} tokens, {config.norm}, "
                    f"{config.positions} positions: you say {said:,}, the tracker reads {kept:,} bytes")
    return None


def _functions():
    """Return (fn, parameters): two functions of a tensor with 48 columns, which save different things."""
    torch.manual_seed(0)
    up, down = torch.nn.Linear(48, 80), torch.nn.Linear(80, 48)
    parameters = [*up.parameters(), *down.parameters()]
    return (lambda x: down(up(down(up(x).tanh())).sin()).exp(), parameters), (lambda x: up(x).sigmoid(), parameters[:2])


def _backward(about, loss, sources):
    try:
        return Asked(lambda: torch.autograd.grad(loss, sources), ANYTHING)()
    except Complaint as complaint:
        raise Complaint(f"{about}in backward {complaint}") from None


@exercise("parity and bytes", torch.Tensor)
def second(once_more):
    """Grade `once_more(fn, x)`, which returns fn(x) with its gradients, keeps only x, and runs fn once more in
    backward."""
    for (fn, parameters), rows, wanted in zip(_functions(), (200, 120), (True, False), strict=True):
        x, runs, about = torch.randn(rows, 48, requires_grad=wanted), [], f"x.requires_grad is {wanted}: "
        sources = [x] * wanted + parameters
        output = fn(x)
        expected = torch.autograd.grad(output.square().sum(), sources)

        def counted(x, fn=fn, runs=runs):
            runs.append(1)
            return fn(x)

        with memory.track(*sources, x) as t:
            y = once_more(counted, x)
            kept = t.now.total - t.start.total - y.nbytes
            if not close(y, output):
                return about + "the output is not fn(x)"
            if not y.requires_grad:
                return about + "the output is right, but has no graph: backward cannot start from it"
            loss = y.square().sum()
            del y
            found = _backward(about, loss, sources)
            del loss
            stays = t.now.total - t.start.total - sum(each.nbytes for each in found)
        if not all(map(close, found, expected)):
            return about + "the gradients are not those of fn(x)"
        if kept > 8192:  # what PyTorch's checkpoint keeps of the random numbers, 5,056 bytes, is allowed
            return about + f"the gradients are right, but {kept:,} bytes are kept besides x and the output"
        if len(runs) != 2:
            return about + f"the gradients are right, but fn runs {len(runs)} times: expected 2, forward and once more"
        if stays > 8192:
            return about + f"the gradients are right, but {stays:,} bytes are still there after backward"
    return None


def saves_nothing(model):
    """Recompute every Linear of the blocks, each as a region of its own."""
    recompute(module for block in model.blocks for module in block.modules() if isinstance(module, torch.nn.Linear))
    return model


def _step(model, tokens):
    """Return (gradients by name, peak in bytes) of a step."""
    torch.manual_seed(2)  # dropout
    with memory.track(model, tokens) as t:
        model(tokens, tokens).backward()
    return {name: p.grad for name, p in model.named_parameters()}, t.peak.total - t.start.total


@exercise("parity and bytes", torch.nn.Module)
def third(apply):
    """Grade `apply(model)`, which returns the model, changed from outside so that its peak falls below 0.6 of what it
    was, with the same gradients."""
    for (config, batch, sequence), dropout in zip(CASES, (0.0, 0.1), strict=True):
        config, tokens = replace(config, dropout=dropout), _tokens(batch, sequence)
        expected, whole = _step(_model(config), tokens)
        step = Asked(lambda model, tokens=tokens: _step(model, tokens), ANYTHING)
        found, peak = step(apply(_model(config)))
        rotary = config.positions == "rotary"
        about = (f"{config.layers} blocks with dropout {dropout}"
                 f"{', each called with x and the rotation of positions' * rotary}: ")
        if found.keys() != expected.keys():
            return about + "the parameters have other names"
        if not all(gradient is not None and close(gradient, expected[name]) for name, gradient in found.items()):
            return about + "the gradients have changed"
        if peak >= 0.6 * whole:
            return about + f"the gradients are right, but the peak is {peak / whole:.3f} of what it was: {peak:,} bytes"
    return None
