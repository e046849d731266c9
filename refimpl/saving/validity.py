"""Asks the optimizer's own class whether it can have what was saved: a toy of it gets that, and makes a step.

A class refuses a negative learning rate when it is made, and fails where a state is not there that its options need,
such as `max_exp_avg_sq` with amsgrad. Nobody can list this for all classes. Where a toy with the options of now fails,
too, as one of a kernel for GPUs alone, only numbers are checked.
"""

import inspect
import math
import reprlib

import torch

from ..side_effects import no_side_effects
from .description import _plain_items
from .dtype_names import DTYPES, name_of
from .schema import is_number

# What torch's schedulers write to param groups: a state may be loaded before they are made.
SCHEDULED = ("initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")


def faults(optimizer, saved):
    """Return sentences on what `optimizer` cannot have of `saved`, a description with states of the same model."""
    found = []
    for number, (group, here) in enumerate(zip(saved["groups"], optimizer.param_groups, strict=True)):
        options, now = group["hyperparameters"], _plain_items(here)
        found += [f"{key} of its param group {number} is {value}: expected finite {'lr >= 0' if key == 'lr' else key}"
                  for key, value in options.items() if value != now.get(key)
                  and not (_is_finite(value) and (key != "lr" or not is_number(value) or value >= 0))]
        states = {name: saved["states"][name] for name in group["parameters"] if saved["states"].get(name)}
        found += [f"{key} of {name} is {kind['value']}: expected a {'count' if key == 'step' else 'finite number'}"
                  for name, kinds in states.items() for key, kind in kinds.items()
                  if "value" in kind and not _can_be(key, kind["value"])]
        if not found:
            new = options.keys() - now.keys() - saved["defaults"].keys() - set(SCHEDULED)
            found += _tried(optimizer, here, now, options, f"its param group {number}", {
                name: (saved["parameters"][name], kinds) for name, kinds in states.items()}, sorted(new))
    return found


def _is_finite(value):
    return all(map(_is_finite, value)) if isinstance(value, (list, tuple)) else not is_number(value) or math.isfinite(
        value)


def _can_be(key, value):
    return _is_finite(value) and (key != "step" or is_number(value) and value >= 0 and value == int(value))


def _tried(optimizer, group, now, options, where, states, new):
    """Return what toys of a param group say to the saved options, and to each kind of state; `now`: its options;
    `new`: those that are saved and not here, which a step may write."""
    dim, seen = group["params"][0].dim() if group["params"] else 1, set()
    for name, (about, kinds) in states.items() or {"": ({"held": "float32", "shape": [2]}, None)}.items():
        dtype, shape = DTYPES[about["held"]], (1 if math.prod(about["shape"]) <= 1 else 2,) * dim
        kind = dtype, shape, *((key, each.get("dtype"), "value" in each) for key, each in (kinds or {}).items())
        if kind in seen:
            continue
        seen.add(kind)
        try:
            _, written = _kept(optimizer, now, dtype, shape)
        except Exception:  # the host cannot run it
            continue
        if unknown := [key for key in new if key not in written]:
            return [f"{unknown[0]} of {where} is {reprlib.repr(options[unknown[0]])}, and the optimizer here has none: "
                    "give it to the optimizer, too"]
        try:
            natural, _ = _kept(optimizer, options, dtype, shape)
        except Exception as error:
            return [f"{where} cannot be: {type(error).__name__}: {error}"]
        try:
            _kept(optimizer, options, dtype, shape, kinds)
        except Exception as error:
            return [f"the optimizer's state of {name} cannot be with {where}: {type(error).__name__}: {error}"]
        for key, each in (kinds or {}).items():
            usual = natural.get(key)
            if "value" not in each and isinstance(usual, torch.Tensor) and DTYPES[each["dtype"]] != usual.dtype:
                return [f"{key} of {name} is {each['dtype']}: expected {name_of(usual.dtype)}"]
    return []


@no_side_effects()
def _kept(optimizer, options, dtype, shape, kinds=None):
    """Return the state after a step of a toy that begins with the state `kinds`, and its param group."""
    known, toy = inspect.signature(type(optimizer)).parameters, torch.nn.Parameter(torch.ones(shape, dtype=dtype))
    made = type(optimizer)([toy], **{key: value for key, value in options.items() if key in known})
    made.param_groups[0].update({**options, **({"capturable": False} if "capturable" in options else {})})
    for key, kind in (kinds or {}).items():
        held = DTYPES[kind["dtype"]] if "dtype" in kind else None
        made.state[toy][key] = (torch.zeros(shape, dtype=held) if "value" not in kind else kind["value"] if held is None
                                else torch.tensor(kind["value"], dtype=held))
    toy.grad = torch.ones_like(toy)
    made.step()
    return made.state[toy], made.param_groups[0]
