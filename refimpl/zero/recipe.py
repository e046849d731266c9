"""What an engine is, in words that JSON can hold: what has to be the same where a checkpoint is loaded, and what is set.

Of a parameter it matters in which dtype it is *held*, that is, updated: fp32 if it is 16-bit and has an fp32 master.
A checkpoint holds what is held. So one of a bf16 model with masters goes to the bit into the same model in fp32, and
one of an fp32 model into the masters of a bf16 one. Stage 0 has no masters: its bf16 parameters are held in bf16.

An optimizer's state of a parameter is, by key, a tensor of the parameter's shape (exp_avg, momentum_buffer), of which
each rank has a piece, or one number for all of it (step).
"""

import torch

from ..memory import mark

NUMBERS = ("step", "mu_product", "eta", "mu")  # what torch's optimizers call a number that they keep in a tensor
SHOWN = 4  # differences that an error lists


def describe(engine):
    """{stage, world_size, step, optimizer, groups, parameters, rest}: the same on every rank.

    TypeError for a hyper-parameter that JSON cannot hold.
    """
    optimizer, masters = engine.optimizer, engine.pieces.masters if engine.stage else {}
    parameters = {slot.name: {"shape": list(slot.parameter.shape), "dtype": name_of(bucket.dtype),
                              "held": name_of(torch.float32 if bucket in masters else bucket.dtype)}
                  for bucket in engine.buckets for slot in bucket.slots}
    groups = [{"parameters": names, "hyperparameters": _plain_items(group)}
              for names, group in zip(engine._members(), engine.param_groups, strict=True)]
    return {"stage": engine.stage, "world_size": engine.comm.world_size, "step": engine._steps,
            "optimizer": class_of(optimizer), "defaults": _plain_items(optimizer.defaults), "groups": groups,
            "parameters": parameters,
            "rest": {name: {"shape": list(tensor.shape), "dtype": name_of(tensor.dtype)}
                     for name, tensor in rest_of(engine).items()}}


def class_of(optimizer):
    """torch.optim.adamw.AdamW, say."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def rest_of(engine):
    """{name: tensor} of what every rank has whole: frozen parameters, and the buffers that a state_dict has."""
    model, kept = engine.model, engine.model.state_dict().keys()
    frozen = {name: p for name, p in model.named_parameters() if p not in engine._bucket_of}
    return frozen | {name: buffer for name, buffer in model.named_buffers() if name in kept}


def name_of(dtype):
    """float32, say; `getattr(torch, …)` is the way back."""
    return str(dtype).removeprefix("torch.")


# --- is it the same? -------------------------------------------------------------------------------------------------


def differences(saved, here):
    """What stands in the way of loading `saved` here, in words; nothing if all is well."""
    found = []
    if saved["optimizer"] != here["optimizer"]:
        found.append(f"its optimizer is {saved['optimizer']}, here {here['optimizer']}")
    for kind in ("parameters", "rest"):
        for name in [*saved[kind], *(name for name in here[kind] if name not in saved[kind])]:
            there, mine = saved[kind].get(name), here[kind].get(name)
            if there is None or mine is None or not _fits(there, mine):
                found.append(f"{name}: {_look(saved, name)}, here {_look(here, name)}")
    members = [[group["parameters"] for group in recipe["groups"]] for recipe in (saved, here)]
    if not found and members[0] != members[1]:
        found.append(f"its param groups have {_sizes(members[0])} parameters, here {_sizes(members[1])}"
                     if _sizes(members[0]) != _sizes(members[1]) else
                     "its param groups are of other parameters, or in another order")
    return list(dict.fromkeys(found))


def listed(found):
    """The first of them, for a message."""
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return "; ".join(found[:SHOWN]) + more


def _fits(there, mine):
    if there["shape"] != mine["shape"]:
        return False
    if "held" in there:
        return there["held"] == mine["held"]
    here = getattr(torch, mine["dtype"])
    return torch.promote_types(getattr(torch, there["dtype"]), here) == here  # nothing is rounded


def _look(recipe, name):
    if (p := recipe["parameters"].get(name)) is not None:
        master = f" with a master in {p['held']}" if p["held"] != p["dtype"] else ""
        return f"{tuple(p['shape'])} {p['dtype']}{master}"
    if (p := recipe["rest"].get(name)) is not None:
        return f"{tuple(p['shape'])} {p['dtype']}, not trained"
    return "absent"


def _sizes(members):
    return " + ".join(str(len(names)) for names in members)


# --- hyper-parameters ------------------------------------------------------------------------------------------------


def set_hyperparameters(engine, groups):
    """lr and all else of each param group."""
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
    raise TypeError(f"the param groups have {key}={value!r}: a checkpoint holds numbers, strings, and lists of them")


def _like(current, value):
    """`value` as the kind of thing that `current` is, which JSON does not tell."""
    if isinstance(current, torch.Tensor):
        return current.fill_(value)
    if isinstance(value, list) and isinstance(current, tuple):
        return tuple(_like(old, new) for old, new in zip(current, value, strict=True))
    return value


# --- the optimizer's state -------------------------------------------------------------------------------------------


def elements(tensor, own, piece):
    """The elements that `piece` names, flat, of a tensor laid out as `own`: as the piece, or as its whole parameter."""
    flat = tensor.detach().view(-1)
    return flat[piece.first : piece.end] if own is piece.slot.parameter else flat


def states_of(engine):
    """{parameter: {key: what it is}} of this rank's pieces: {"dtype"} of a tensor with a number for each element,
    {"value"} of a number that is the parameter's, with a "dtype" if it is in a tensor. TypeError for anything else."""
    return {piece.slot.name: state_of(engine, piece, own)
            for pairs in engine._shared_out().values() for piece, own in pairs}


def state_of(engine, piece, own):
    """{key: what it is} of one piece."""
    return {key: kind_of(key, value, own, piece.slot.name)
            for key, value in engine.optimizer.state.get(own, {}).items()}


def kind_of(key, value, own, name):
    if value is None or isinstance(value, (bool, int, float)):
        return {"value": value}
    if isinstance(value, torch.Tensor):
        if value.shape == own.shape and key not in NUMBERS:
            return {"dtype": name_of(value.dtype)}
        if value.numel() == 1:
            return {"dtype": name_of(value.dtype), "value": value.item()}
    look = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise TypeError(f"the optimizer's state {key!r} of {name} is {look}: expected a number, or a tensor of the shape "
                    f"{tuple(own.shape)}, which can be cut into pieces")


def merged(told):
    """One of what each rank's `states_of` is. RuntimeError if two tell otherwise of one parameter."""
    found = {}
    for rank, states in enumerate(told):
        for name, state in states.items():
            if found.setdefault(name, state) != state:
                raise RuntimeError(f"rank {rank} has another optimizer state of {name} than ranks before it: {state}, "
                                   f"{found[name]}")
    return found


def places(engine, states):
    """{parameter: (Piece, {key: flat tensor})}: where to write the values of all that this rank holds, after making its
    optimizer's state what `states` says. The keys are "parameters", and "optimizer/exp_avg" and the like."""
    group_of = {own: group for group in engine.param_groups for own in group["params"]}
    found = {}
    for pairs in engine._held().values():
        for piece, own in pairs:
            state = states.get(piece.slot.name)
            views = {} if not state else _make(engine.optimizer.state[own], own, state, group_of[own])
            if not state:
                engine.optimizer.state.pop(own, None)
            found[piece.slot.name] = piece, {key: elements(x, own, piece) for key, x in
                                             {"parameters": own, **views}.items()}
    return found


def _make(held, own, state, group):
    """Make `held`, the optimizer's state of `own`, what `state` says: {key: tensor that waits for its values}."""
    found = {}
    for key in [key for key in held if key not in state]:
        del held[key]
    for key, kind in state.items():
        dtype = getattr(torch, kind["dtype"]) if "dtype" in kind else None
        if "value" not in kind:
            if key not in held or held[key].dtype != dtype or held[key].shape != own.shape:
                held[key] = mark(torch.zeros_like(own, dtype=dtype, requires_grad=False), "optimizer state")
            found[f"optimizer/{key}"] = held[key]
        elif dtype is None:
            held[key] = kind["value"]
        else:  # where torch's Optimizer.load_state_dict puts it
            on_device = key != "step" or group.get("capturable") or group.get("fused")
            held[key] = torch.tensor(kind["value"], dtype=dtype, device=own.device if on_device else "cpu")
    return found
