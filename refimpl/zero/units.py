"""Units of stage 3: modules whose parameters are gathered and released together, and the buckets of each."""

import torch
from torch import nn

from .bucket import Bucket
from .internals.released import PLAIN


def unit_buckets(named, units, world_size, persistence_threshold=0):
    """Return a Bucket for each unit and dtype, the last unit first, and others for parameters that stay whole. A
    parameter of several units is in the bucket of the one with the fewest parameters, such as the innermost, whatever
    the order of `units`. ValueError for a parameter that is in none."""
    names, buckets, owner, of_unit = {p: name for name, p in named}, [], {}, parameters_of_units(units)
    for unit, parameters in sorted(of_unit.items(), key=lambda item: len(item[1])):
        for p in parameters:
            owner.setdefault(p, unit)
    if left := [name for p, name in names.items() if p not in owner]:
        raise ValueError(f"{left[0]} is in none of the {len(units)} units: name a module that holds it")
    for unit, parameters in of_unit.items():
        kinds = {}
        for p in parameters:
            if p in names and owner[p] is unit:  # a shared parameter has one bucket, in one unit
                kinds.setdefault((p.dtype, p.device, p.numel() < persistence_threshold), []).append((names[p], p))
        buckets += [Bucket(slots, world_size) for slots in kinds.values()]
    return buckets[::-1]


def frozen_buckets(model, units, world_size, persistence_threshold=0):
    """Return Buckets, as `unit_buckets` does, of the parameters that are not trained. Those that are no plain tensors,
    that are in no unit, or that have fewer elements than `persistence_threshold` stay whole."""
    in_units = {p for parameters in parameters_of_units(units).values() for p in parameters}
    named = [(name, p) for name, p in model.named_parameters() if not p.requires_grad and p in in_units
             and type(p) in PLAIN and p.layout is torch.strided and p.numel() >= max(1, persistence_threshold)]
    return unit_buckets(named, units, world_size)


def parameters_of_units(units):
    """Return {unit: the parameters that are gathered with it}: those of its modules, see `modules_of_units`."""
    return {unit: list(dict.fromkeys(p for module in modules for p in module.parameters(recurse=False)))
            for unit, modules in modules_of_units(units).items()}


def modules_of_units(units):
    """Return {unit: all modules in it, but not those of units among the `blocks` in it}. So a model with a parameter
    of its own beside its blocks does not gather all of them."""
    known, found = set(units), {}
    for unit in units:
        apart = {module for block in blocks(unit) for module in block.modules() if module in known} - {unit}
        found[unit] = [module for _, module in unit.named_modules(memo=apart)]
    return found


def default_units(model):
    """Return the model's `blocks`, and every module outside of them that has parameters of its own. A module without a
    forward, a list or a dict, is never called: its parameters count as its parent's, and each module in it is a unit by
    itself."""
    found, apart = {}, set(blocks(model))

    def walk(module):
        if module is model or _is_called(module):
            if module in apart or _has_own(module):
                found[module] = None
            if module in apart:
                return
        for child in module.children():
            walk(child)

    walk(model)
    return list(found)


def reads_weights_in_backward(unit):
    """Tell whether a unit's backward may read its parameters. A plain nn.Embedding's needs indices alone; one with a
    forward of its own, or with somebody's hooks, may compute anything with its weight."""
    hooks = (*unit._forward_pre_hooks.values(), *unit._forward_hooks.values())
    return type(unit) is not nn.Embedding or "forward" in vars(unit) or any(
        not str(getattr(hook, "__module__", "")).startswith(__package__.partition(".")[0] + ".") for hook in hooks)


def large_heads(model, buckets):
    """Return the set of buckets that have more elements than half of the largest of the model's `blocks`, and hold none
    of theirs, as the head of a large vocabulary and its table; without blocks none. (Half: a smaller one is not worth
    one more collective.)"""
    inside = [list(block.parameters()) for block in blocks(model)]
    largest = max((sum(p.numel() for p in each) for each in inside), default=0)
    known = {p for each in inside for p in each}
    return {bucket for bucket in buckets if 2 * bucket.numel > largest > 0 and known.isdisjoint(bucket.parameters)}


def blocks(model):
    """Return the modules that repeat in a model, in its order, whatever holds them:

    - the elements of a ModuleList,
    - in a Sequential, in a ModuleDict or among the attributes of one module, those of one class, if there are several,
      and each is made of several modules with parameters.

    Of such in one another the outer ones count, unless those that follow in a Sequential are inside them: a stage of
    blocks is no block. Nor is an attribute or a ModuleDict's element that has a ModuleList: an encoder and a decoder
    are of one class, and hold the blocks.
    """
    found = []
    for child in model.children():
        found += _called_in(child) if _is_block(child, model) else blocks(child)
    return list(dict.fromkeys(found))


def _called_in(module):
    """Return the module, or, if it is a list or a dict, the called modules in it."""
    return [module] if _is_called(module) else [each for child in module.children() for each in _called_in(child)]


def _is_block(module, parent):
    if isinstance(parent, nn.ModuleList):
        return True
    if not _is_made_of_several(module) or sum(type(each) is type(module) for each in parent.children()) < 2:
        return False
    lists = nn.Sequential if isinstance(parent, nn.Sequential) else (nn.Sequential, nn.ModuleList)
    return not any(isinstance(inner, lists) and (isinstance(inner, nn.ModuleList) or any(
        _is_block(each, inner) for each in inner.children())) for inner in module.modules())


def _is_made_of_several(module):
    """Tell whether several modules with parameters are in it, and it is called as one."""
    return _is_called(module) and type(module) is not nn.Sequential and sum(
        bool(each._parameters) for each in module.modules()) > 1


def _is_called(module):
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _has_own(module):
    """Tell whether the module has parameters that are not in a called module inside it."""
    return next(module.parameters(recurse=False), None) is not None or any(
        _has_own(child) for child in module.children() if not _is_called(child))
