"""Describes an engine in JSON: what has to be the same where a saved state is loaded.

A parameter is *held* in the dtype in which it is updated: fp32 if it is 16-bit and has an fp32 master. Saved are the
values as they are held. So the saved state of a bf16 model with masters loads to the bit into the same model in fp32,
and that of an fp32 model into the masters of a bf16 one. Stage 0 has no masters: it holds bf16 parameters in bf16.
"""

import torch

from .rest import frozen_of, rest_of

SHOWN = 4  # differences that an error lists
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def describe(engine):
    """Return {stage, world_size, step, optimizer, defaults, groups, parameters, rest}, the same on every rank.

    `rest` is what is not trained. TypeError for a hyper-parameter that JSON cannot hold.
    """
    optimizer, masters = engine.optimizer, engine.sharded_optimizer.masters if engine.stage else {}
    parameters = {slot.name: {"shape": list(slot.parameter.shape), "dtype": name_of(bucket.dtype),
                              "held": name_of(torch.float32 if bucket in masters else bucket.dtype)}
                  for bucket in engine.buckets for slot in bucket.slots}
    groups = [{"parameters": names, "hyperparameters": _plain_items(group)}
              for names, group in zip(engine._group_names(), engine.param_groups, strict=True)]
    return {"stage": engine.stage, "world_size": engine.comm.world_size, "step": engine._steps,
            "optimizer": class_of(optimizer), "defaults": _plain_items(optimizer.defaults), "groups": groups,
            "parameters": parameters,
            "rest": {name: {"shape": list(tensor.shape), "dtype": name_of(tensor.dtype)}
                     for name, tensor in {**frozen_of(engine), **rest_of(engine)}.items()}}


def class_of(optimizer):
    """Return the full name of its class, such as torch.optim.adamw.AdamW."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def name_of(dtype):
    """Return the name of a dtype, such as float32; `DTYPES[name]` is the way back."""
    return str(dtype).removeprefix("torch.")


# --- is it the same? -------------------------------------------------------------------------------------------------


def differences(saved, here):
    """Return sentences on why `saved` cannot be loaded here, two descriptions; an empty list if it can."""
    found = []
    if saved["optimizer"] != here["optimizer"]:
        found.append(f"its optimizer is {saved['optimizer']}, here {here['optimizer']}")
    for kind in ("parameters", "rest"):
        for name in [*saved[kind], *(name for name in here[kind] if name not in saved[kind])]:
            there, mine = saved[kind].get(name), here[kind].get(name)
            if there is None or mine is None or not _fits(there, mine):
                found.append(f"{name}: {_shown(saved, name)}, here {_shown(here, name)}")
    members = [[group["parameters"] for group in description["groups"]] for description in (saved, here)]
    if not found and members[0] != members[1]:
        found.append(f"its param groups have {_sizes(members[0])} parameters, here {_sizes(members[1])}"
                     if _sizes(members[0]) != _sizes(members[1]) else
                     "its param groups are of other parameters, or in another order")
    for number, groups in enumerate(zip(saved["groups"], here["groups"], strict=not found)):
        found += [f"{key} of its param group {number} is {said}"
                  for key, said in _other_kinds(*(group["hyperparameters"] for group in groups), saved["defaults"])]
    return list(dict.fromkeys(found))


def listed(found):
    """Return the first of them, joined for a message."""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _fits(there, mine):
    if there["shape"] != mine["shape"]:
        return False
    if "held" in there:
        return there["held"] == mine["held"]
    saved, here = DTYPES[there["dtype"]], DTYPES[mine["dtype"]]
    return torch.promote_types(saved, here) == here and saved.is_floating_point == here.is_floating_point  # no rounding


def _shown(description, name):
    if (p := description["parameters"].get(name)) is not None:
        master = f" with a master in {p['held']}" if p["held"] != p["dtype"] else ""
        return f"{tuple(p['shape'])} {p['dtype']}{master}"
    if (p := description["rest"].get(name)) is not None:
        return f"{tuple(p['shape'])} {p['dtype']}, not trained"
    return "absent"


def _other_kinds(saved, here, defaults):
    """Yield (key, words) of hyper-parameters that are missing, or that the optimizer here cannot have."""
    for key in defaults:
        if key not in saved:
            yield key, "missing"
    for key, value in saved.items():
        known = [_kind(group[key]) for group in (here, defaults) if key in group]
        if known and _kind(value) not in known:
            yield key, f"{value!r}: expected {' or '.join(dict.fromkeys(known))}"


def _kind(value):
    """Return in words which values can stand where this one does."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_kind, value))}]"
    return "a string" if isinstance(value, str) else "True, False or None" if value is None or isinstance(
        value, bool) else "a number"


def _sizes(members):
    return " + ".join(str(len(names)) for names in members)


# --- hyper-parameters ------------------------------------------------------------------------------------------------


def set_hyperparameters(engine, groups):
    """Set lr and all other hyper-parameters of each param group."""
    for group, saved in zip(engine.param_groups, groups, strict=True):
        for key, value in saved["hyperparameters"].items():
            group[key] = _like(group.get(key), value)


def _plain_items(group):
    return {key: _plain(value, key) for key, value in group.items() if key != "params"}


def _plain(value, key):
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(each, key) for each in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"the param groups have {key}={value!r}: expected numbers, strings, or lists of them, "
                    "which can be saved")


def _like(current, value):
    """Return `value`, read from JSON, as a tensor or tuple if `current` is one."""
    if isinstance(current, torch.Tensor):
        return current.fill_(value)
    if isinstance(value, list) and isinstance(current, tuple):
        return tuple(_like(old, new) for old, new in zip(current, value, strict=True))
    return value
