"""What a model computed, and where another that should compute the same does not."""

import contextlib
from typing import NamedTuple

import torch

from .fp64 import InFP64

FAR = 1e-7  # of a tensor's largest number: computations of the same in fp64 differ by 1e-12 or less


class CutDiffers(ValueError):
    """Raised before a model is cut whose parts would not compute what the whole does. The text names the module whose
    output is the first to differ, or else the parameter whose gradient does."""


class CannotShrink(ValueError):
    """Raised for a model of which no toy can be made. The text names the key of its config, or the module."""


class Computed(NamedTuple):
    """`outputs`: {name of a module: what it returned first}, in the order of the calls. `results`: {name: tensor}.
    `gradients`: {name of a parameter: its gradient, or None}."""

    outputs: dict
    results: dict
    gradients: dict


def computed(model, forward):
    """Return what a model computes: `forward()` returns {name: tensor}, of which "loss" is differentiated."""
    model.zero_grad(set_to_none=True)
    with InFP64(), watched(model) as outputs:
        results = forward()
        results["loss"].backward()
    return Computed(outputs, {name: x.detach() for name, x in results.items()},
                    {name: p.grad for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad})


@contextlib.contextmanager
def watched(model):
    """Note what each module of a model returns in its first call: yields {name: tensor}."""
    found, names = {}, {module: name for name, module in model.named_modules() if name}

    def note(module, args, output):
        output = output[0] if isinstance(output, tuple) and output else output
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            found.setdefault(names[module], output.detach())

    handles = [module.register_forward_hook(note) for module in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def difference(whole, cut, part=lambda name, gradients: gradients[name]):
    """Return a text that names the first difference between two Computed, or None. `part`: what a cut model's
    parameter of this name has of the whole's gradients."""
    for name, x in whole.outputs.items():
        there = cut.outputs.get(name)
        if there is not None and there.shape == x.shape and (by := _apart(x, there)) > FAR:
            return f"what {name} returns differs by {by:.1e} of its largest number"
    for name, x in whole.results.items():
        if name in cut.results and (by := _apart(x, cut.results[name])) > FAR:
            return f"its {name} differs by {by:.1e}"
    most = max((x.abs().max().item() for x in whole.gradients.values() if x is not None), default=0)
    for name, there in cut.gradients.items():
        x = part(name, whole.gradients)
        if (by := _apart(x, there, 1e-3 * most)) > FAR:
            return f"the gradient of {name} differs by {by:.1e} of its largest number"
    return None


def _apart(x, y, floor=0.0):
    """Return by how much two tensors differ, in proportion to the largest number of the first or to `floor`."""
    if x is None and y is None:
        return 0.0
    x, y = torch.zeros_like(y) if x is None else x, torch.zeros_like(x) if y is None else y
    if x.shape != y.shape:
        return float("inf")
    if x.numel() == 0:
        return 0.0
    apart = (x - y).abs().max().item() / max(x.abs().max().item(), floor, 1e-30)
    return apart if apart == apart else float("inf")
