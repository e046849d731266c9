"""Units of stage 3: modules whose parameters are gathered and released together, and the buckets of each."""

import torch
from torch import nn

from .bucket import Bucket


def unit_buckets(named, units, world_size, persistence_threshold=0):
    """Return a Bucket for each unit and dtype, the last unit first, and others for parameters that stay whole. A
    parameter of several units is in the first one's bucket. ValueError for a parameter that is in none."""
    names, buckets, taken = {p: name for name, p in named}, [], set()
    for parameters in parameters_of_units(units).values():
        kinds = {}
        for p in parameters:
            if p in names and p not in taken:
                kinds.setdefault((p.dtype, p.device, p.numel() < persistence_threshold), []).append((names[p], p))
                taken.add(p)
        buckets += [Bucket(slots, world_size) for slots in kinds.values()]
    if left := [name for p, name in names.items() if p not in taken]:
        raise ValueError(f"{left[0]} is in none of the {len(units)} units: name a module that holds it")
    return buckets[::-1]


def frozen_buckets(model, units, world_size, persistence_threshold=0):
    """Return Buckets, as `unit_buckets` does, of the parameters that are not trained. Those that are no plain tensors,
    that are in no unit, or that have fewer elements than `persistence_threshold` stay whole."""
    in_units = {p for parameters in parameters_of_units(units).values() for p in parameters}
    named = [(name, p) for name, p in model.named_parameters() if not p.requires_grad and p in in_units
             and type(p) is nn.Parameter and p.layout is torch.strided and p.numel() >= max(1, persistence_threshold)]
    return unit_buckets(named, units, world_size)


def parameters_of_units(units):
    """Return {unit: the parameters that are gathered with it}: those of its modules, see `modules_of_units`."""
    return {unit: list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))
            for unit, modules in modules_of_units(units).items()}


def modules_of_units(units):
    """Return {unit: all modules in it, but not those of units that it has in a ModuleList}. So a model with a parameter
    of its own beside its blocks does not gather all of them."""
    known, found = set(units), {}
    for unit in units:
        lists = [module for module in unit.modules() if isinstance(module, nn.ModuleList)]
        apart = {module for each in lists for module in each.modules() if module in known} - {unit}
        found[unit] = [module for _, module in unit.named_modules(memo=apart)]
    return found


def default_units(model):
    """Return the elements of each ModuleList, and every module outside of them that has parameters of its own. A module
    without a forward, a list or a dict, is never called: its parameters count as its parent's, and each module in it
    is a unit by itself."""
    found = {}

    def walk(module, in_list):
        if module is model or _is_called(module):
            if in_list or _has_own(module):
                found[module] = None
            if in_list:
                return
        for child in module.children():
            walk(child, isinstance(module, nn.ModuleList) or in_list)

    walk(model, False)
    return list(found)


def _is_called(module):
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _has_own(module):
    """Tell whether the module has parameters that are not in a called module inside it."""
    return next(module.parameters(recurse=False), None) is not None or any(
        _has_own(child) for child in module.children() if not _is_called(child))
