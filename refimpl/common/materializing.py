"""How a model on the meta device, which has shapes and no bytes, gets its values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from .marks import mark


def build(stages: Any, device: torch.device | str, initialize: Callable[[nn.Module], Any] | None = None) -> None:
    """Give bytes and values to what modules have on the meta device, in place.

    A module's values are those of its `reset_parameters()`, if it has one, and then of `initialize(module)`, the
    children's before their parent's. What two modules share they share afterwards. ValueError for a parameter or buffer
    that has no values then.
    """
    new, touched = [], set()
    for module, found in replaced(stages, lambda tensor: _made(tensor, device)).items():
        if found or touched.intersection(module.children()):
            new.append((module, found))
            touched.add(module)
    with torch.no_grad():
        for module, names in new:  # a block, too: it may give its layers other values than these do themselves
            if names and hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if initialize is not None:
                initialize(module)
    for module, names in new:
        for name in names:
            if lacks_values(getattr(module, name)):
                raise ValueError(f"{name} of {type(module).__name__} has no values after reset_parameters() and "
                                 "initialize(): give initialize= a function of a module that writes them")


def _made(tensor, device):
    floating = tensor.is_floating_point() or tensor.is_complex()
    value = torch.full(tensor.shape, torch.nan if floating else 0, dtype=tensor.dtype, device=device)
    if not isinstance(tensor, nn.Parameter):
        return mark(value, "buffers")
    parameter = nn.Parameter(mark(value, "parameters"), tensor.requires_grad)
    own = parameter.__dict__  # a fake tensor has its device there
    own.update({key: each for key, each in tensor.__dict__.items() if key not in own})
    return parameter


def replaced(modules, make):
    """Put `make(tensor)` in the place of each parameter and buffer on the meta device, one for all names of a tensor.
    Return {module: {name: what is new}}, the children before their parents; {} if nothing was there."""
    made, found = {}, {}
    for module in _children_first(modules, set()):
        found[module] = {}
        for kind in (module._parameters, module._buffers):
            for name, tensor in kind.items():
                if tensor is not None and tensor.device.type == "meta":
                    if tensor not in made:
                        made[tensor] = make(tensor)
                    kind[name] = found[module][name] = made[tensor]
    return found if made else {}


def _children_first(modules, seen):
    """Yield modules and all below them, each once and after its children."""
    for module in modules:
        if module not in seen:
            seen.add(module)
            yield from _children_first(module.children(), seen)
            yield module


def no_value(dtype):
    """Return what a tensor of `dtype` reads as while it has no values: NaN; of integers the lowest number."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.nan
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def lacks_values(tensor):
    """Tell whether nothing has been written to an element of it; None if that cannot be known."""
    if isinstance(tensor, FakeTensor) or tensor.dtype is torch.bool or not tensor.numel():
        return None
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(torch.linalg.vector_norm(tensor, torch.inf).isnan())  # without a temporary tensor
    return bool(tensor.amin() == no_value(tensor.dtype))
