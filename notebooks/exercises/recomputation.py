"""Exercises of the page *Recomputation*."""

import torch

from refimpl import memory
from refimpl.checkpointing import recompute
from refimpl.model import GPT, GPTConfig

from . import exercise

CONFIGS = (
    GPTConfig(vocab_size=256, context_length=64, layers=3, hidden=32, heads=4),
    GPTConfig(vocab_size=128, context_length=96, layers=2, hidden=48, heads=4, activation="swiglu", norm="rmsnorm",
              positions="rotary"),
)


def _step(apply, config=CONFIGS[0], sequence=64):
    """Return (gradients, bytes kept by the forward, peak in bytes) of a step of a model that `apply` has changed."""
    torch.manual_seed(0)
    model, tokens = GPT(config), torch.randint(0, 128, (2, sequence))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    apply(model)
    with memory.track(model, tokens) as t:
        loss = model(tokens, tokens)
        kept = t.now["activations"]
        loss.backward()
    return [p.grad for p in model.parameters()], kept, t.peak.total - t.start.total


@exercise("bytes", int)
def first(predict):
    """Grade `predict(config, batch, sequence)`, which returns the bytes of activations after the forward when every
    block is recomputed."""
    for config, sequence in zip(CONFIGS, (64, 96), strict=True):
        kept = _step(lambda model: recompute(model.blocks), config, sequence)[1]
        said = predict(config, 2, sequence)
        if said != kept:
            return (f"{config.layers} layers of {config.hidden}, {config.norm}, {config.positions} positions: you "
                    f"say {said:,}, the tracker reads {kept:,} bytes")
    return None


@exercise("parity and bytes", torch.Tensor)
def second(once_more):
    """Grade `once_more(fn, x)`, which returns fn(x) with its gradients, and keeps only x, by `saved_tensors_hooks`."""
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 64), torch.randn(256, 64, requires_grad=True)

    def fn(x):
        return layer(layer(layer(x).tanh()).sin()).exp()

    expected = torch.autograd.grad(fn(x).sum(), [x, *layer.parameters()])
    with memory.track(layer, x) as t:
        y = once_more(fn, x)
    kept = t.now.total - t.start.total - y.nbytes
    if not torch.equal(y, fn(x)):
        return "the output is not that of fn(x)"
    found = torch.autograd.grad(y.sum(), [x, *layer.parameters()])
    if not all(map(torch.equal, found, expected)):
        return "the gradients are not those of fn(x)"
    return None if kept < 1024 else f"the gradients are right, but {kept:,} bytes are kept besides x and the output"


def saves_nothing(model):
    """Recompute every Linear of the blocks, each as a region of its own."""
    recompute(module for block in model.blocks for module in block.modules() if isinstance(module, torch.nn.Linear))


@exercise("what is computed")
def third(apply):
    """Grade `apply(model)`, which changes the model from outside, so that its peak falls below 0.6 of what it was. It
    returns True."""
    def changed(model):
        apply(model)

    expected, _, whole = _step(lambda model: None)
    found, _, peak = _step(changed)
    if not all(map(torch.equal, found, expected)):
        return "the gradients have changed"
    return None if peak < 0.6 * whole else f"the peak is {peak:,} of {whole:,} bytes: expected below 0.6"
