"""Whether a module and what shall replace it give the same numbers: both are tried on a toy of a few features."""

import inspect
from itertools import product

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ..side_effects import no_side_effects

# keep, chunk_size, dtype (None: the weights' own), under autocast; the largest error by the largest number
TRIALS = (("input", None, None, False), ("hidden", 4, torch.float64, False), ("input", None, None, True))
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.04, torch.float16: 0.01}


class _Toy(nn.Module):
    """A linear layer from d features to e."""

    def __init__(self, d, e, bias, flipped, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn((d, e) if flipped else (e, d), dtype=dtype) / d**0.5)
        self.bias = nn.Parameter(torch.randn(e, dtype=dtype)) if bias else None
        self.flipped = flipped

    def forward(self, x):
        return F.linear(x, self.weight.T if self.flipped else self.weight, self.bias)


def differs(mlp, form, replaced):
    """Return what differs, in words, or None. `form`: the FeedForward that `mlp` is. `replaced(toy, keep, chunk_size)`
    returns the replacement for a copy of `mlp` whose linear layers are from 4 features, and to 4.

    Compared are outputs and all gradients, in training and in evaluation, in the weights' dtype, in fp64 in chunks, and
    under autocast. Of `mlp` nothing is called but modules without weights, nothing is changed, and the state of the
    random numbers is that of before.
    """
    with no_side_effects(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        for training, (keep, chunk_size, dtype, autocast) in product((True, False), TRIALS):
            toy = _toy(mlp, form, dtype)
            dtype = next(toy.parameters()).dtype
            bound = BOUNDS[torch.bfloat16 if autocast and dtype != torch.float64 else dtype]
            where = f" in {'training' if training else 'evaluation'}{', under autocast' * autocast}"
            try:
                with torch.autocast("cpu", torch.bfloat16, autocast):
                    mine, other = (_outcome(each.train(training), toy, dtype)
                                   for each in (toy, replaced(toy, keep, chunk_size)))
            except Exception as error:  # someone's code, on sizes that need not be its own
                return f"it cannot be tried{where} ({error})"
            for name in mine.keys() | other.keys():
                a, b = mine.get(name), other.get(name)
                if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype or not (
                        (a.double() - b.double()).abs().max() <= bound * (1 + a.double().abs().max())):
                    return name + where
    return None


def _toy(mlp, form, dtype):
    """Return a copy of `mlp` of a few features, with random weights, and the hidden layer's own size."""
    torch.default_generator.manual_seed(0)
    layers = [mlp.get_submodule(name) for name in (*form.ups, form.down)]
    ends = [layer.weight.shape[::1 if flip else -1] for layer, flip in zip(layers, form.flipped, strict=True)]
    to = 4 if ends[-1][1] == ends[0][0] else 5  # a residual inside needs an output as wide as the input
    sizes = [*((4, e) for _, e in ends[:-1]), (ends[-1][0], to)]
    return shallow(mlp, {layer: _Toy(*size, getattr(layer, "bias", None) is not None, flip, dtype or layer.weight.dtype)
                         for layer, size, flip in zip(layers, sizes, form.flipped, strict=True)})


def _outcome(module, toy, dtype):
    """Return {name: what a module returns, or a gradient}."""
    torch.default_generator.manual_seed(1)  # both modules are given the same numbers
    needed = [each for each in inspect.signature(toy.forward).parameters.values() if each.default is each.empty]
    given = {each.name: torch.randn(2, 3, 4, dtype=dtype).mul(4).requires_grad_() for each in needed}
    results = [each for each in tree_leaves(module(*given.values())) if torch.is_tensor(each)]
    outputs = {f"output {k}": each for k, each in enumerate(results)}
    wanted = {**given, **dict(toy.named_parameters())}
    gradients = torch.autograd.grad(results, [*wanted.values()], [torch.randn_like(each) for each in results])
    return outputs | {f"the gradient of {name}": each for name, each in zip(wanted, gradients, strict=True)}


def shallow(module, instead=None):
    """Return a copy of a module whose modules are copies, too, with the same tensors; `instead`: {module: another}."""
    if instead and module in instead:
        return instead[module]
    twin = type(module).__new__(type(module))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = {name: child if child is None else shallow(child, instead)
                     for name, child in module._modules.items()}
    return twin
