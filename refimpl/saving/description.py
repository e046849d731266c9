"""Describes in JSON what all ranks hold together: what has to be the same where a saved state is loaded.

A parameter is *held* in the dtype in which it is updated: fp32 if it is 16-bit and has an fp32 master. Saved are the
values as they are held. So the saved state of a bf16 model with masters loads to the bit into the same model in fp32,
and that of an fp32 model into the masters of a bf16 one. Without masters bf16 parameters are held in bf16.
"""

import itertools
import reprlib
from collections import Counter

import torch

from ..comm.texts import gather_results
from ..sharding import ShardSpec, check_replicas, check_specs
from .dtype_names import DTYPES, name_of, tensor_of
from .optimizer_state import state_of

SHOWN = 4  # differences that an error lists


def describe(state, saving=False):
    """Return (description, reports): {about, world_size, step, optimizer, defaults, groups, parameters, rest} of what
    all ranks hold together, `rest` being what is not trained; and [what each rank owns]. All ranks call it.

    With `saving` also "states": {parameter: {key: kind}} of the optimizer. Then ranks have to agree in these and in
    their hyper-parameters (RuntimeError); a load makes them agree. TypeError for what JSON cannot hold. ValueError
    unless each element is owned once and replicas name each other. Rank 0 checks that: others raise a RankError.
    """
    comm = state.comm
    reports = gather_results(comm, lambda: _report(state, saving))
    gather_results(comm, lambda: None if comm.rank else _check_reports(reports, saving))
    tensors, groups = _merged(reports, "tensors"), []
    for i, group in enumerate(state.optimizer.param_groups):
        names = dict.fromkeys(itertools.chain(*(report["groups"][i]["parameters"] for report in reports)))
        groups.append({"parameters": list(names), "hyperparameters": _plain_items(group)})
    found = {"about": state.about, "world_size": comm.world_size, "step": state.step,
             "optimizer": class_of(state.optimizer), "defaults": _plain_items(state.optimizer.defaults),
             "groups": groups, "parameters": {name: {key: each[key] for key in ("shape", "dtype", "held")}
                                              for name, each in tensors.items() if each["trained"]},
             "rest": {name: {"shape": each["shape"], "dtype": each["held"]}
                      for name, each in tensors.items() if not each["trained"]}}
    return found | ({"states": _merged(reports, "states")} if saving else {}), reports


def _report(state, saving):
    """Return what this rank owns, and what the others have to know of it; `places`: how many groups are loaded before
    that of a tensor."""
    groups = [{"parameters": list(names), "hyperparameters": _plain_items(group)}
              for names, group in zip(state.groups, state.optimizer.param_groups, strict=True)]
    numbers = {group: i for i, group in enumerate(dict.fromkeys(shard.group for shard in state.shards))}
    owned = [(shard.spec.name, shard) for shard in state.shards if shard.owned is not None]
    known = {name for name, _ in owned}
    return {"rank": state.comm.ranks[state.comm.rank], "groups": groups,
            "places": [(name, numbers[shard.group]) for name, shard in owned],
            "tensors": [(name, {"shape": list(shard.spec.shape), "dtype": name_of(shard.dtype), "held":
                                name_of(shard.values.dtype), "trained": shard.own is not None})
                        for name, shard in owned],
            "pieces": {part: piece_of(shard.owned) for shard, part in state.written.items()},
            "replicas": [[shard.spec.name, list(shard.spec.shape), piece_of(shard.spec), list(shard.spec.replicas)]
                         for shard in state.shards if len(shard.spec.replicas) > 1],
            "names": {other: name for other, name in state.names.items()
                      if state.comm.rank == 0 or name in known or name != other},
            "states": [(name, state_of(state, shard)) for name, shard in owned if shard.own is not None]
            if saving else []}


def _check_reports(reports, saving):
    check_specs([[spec for parts in located(dict(report["tensors"]), {0: report["pieces"]}).values()
                  for _, _, spec in parts] for report in reports])
    check_replicas([[spec_from(*each) for each in report["replicas"]] for report in reports])
    known = {name for report in reports for name, _ in report["tensors"]}
    for report in reports:
        counts = Counter(itertools.chain(*(set(group["parameters"]) for group in report["groups"])))
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"{twice[0]} is in {counts[twice[0]]} param groups: expected all parts of it in one")
        trained = {name: "a param group" for group in report["groups"] for name in group["parameters"]}
        for name, where in (dict.fromkeys(report["names"].values(), "the model") | trained).items():
            if name not in known:
                raise ValueError(f"{name} is in {where}, and no rank owns a part of it: one has to, also of a tensor "
                                 "without elements")
    for report in reports:
        mine, first = ([group["hyperparameters"] for group in each["groups"]] for each in (report, reports[0]))
        if len(mine) != len(first) or saving and repr(mine) != repr(first):
            raise RuntimeError(f"rank {report['rank']} has param groups with {mine}, rank {reports[0]['rank']} with "
                               f"{first}: expected the same hyper-parameters on all ranks")


def _merged(reports, what):
    """Merge what each rank said of its tensors. RuntimeError if two ranks say another thing of one."""
    found = {}
    for report in reports:
        for name, each in report[what]:
            if found.setdefault(name, each) != each:
                said = "optimizer state" if what == "states" else "description"
                raise RuntimeError(f"rank {report['rank']} has another {said} of {name} than ranks before it: {each}, "
                                   f"{found[name]}")
    return found


def piece_of(spec):
    """Return a spec in JSON: [first, end]; of a block that is not the whole tensor, or that is in an order of its own,
    also its offsets, its lengths, that order, and of fused parts which dim has how many."""
    more = [list(spec.order)] if spec.order or spec.fused else []
    more += [list(spec.fused)] if spec.fused else []
    block = [list(spec.offsets), list(spec.lengths)] if more or spec.lengths != spec.shape else []
    return [spec.first, spec.end, *block, *more]


def spec_from(name, shape, piece, replicas=()):
    """Return the ShardSpec of a piece in JSON. ValueError if the tensor has no such part."""
    first, end, offsets, lengths, order, fused = (*piece, *(None, None, (), ())[len(piece) - 2 :])
    if fused and not (len(fused) == 2 and fused[0] < len(shape) and fused[1] > 1):
        raise ValueError(f"{name}: fused {fused}: expected a dim of {shape} and how many parts it has")
    if order and sorted(order) != list(range(len(shape))):
        raise ValueError(f"{name}: order {order}: expected the dims of {shape}")
    return ShardSpec(name, shape, offsets, lengths, first, end, replicas, order, fused)


def located(tensors, pieces):
    """Return {name: [(where, name of a part, its ShardSpec)]} of {where: {name of a part: its piece in JSON}}."""
    found = {}
    for where, each in pieces.items():
        for part, piece in each.items():
            name = tensor_of(part)
            found.setdefault(name, []).append((where, part, spec_from(name, tensors[name]["shape"], piece)))
    return found


def class_of(optimizer):
    """Return the full name of its class, such as torch.optim.adamw.AdamW."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


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
    members = [[sorted(group["parameters"]) for group in description["groups"]] for description in (saved, here)]
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
            yield key, f"{reprlib.repr(value)}: expected {' or '.join(dict.fromkeys(known))}"


def _kind(value):
    """Return in words which values can stand where this one does."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_kind, value))}]"
    if isinstance(value, str):
        return "a string"
    return "True, False or None" if value is None or isinstance(value, bool) else "a number"


def _sizes(members):
    return " + ".join(str(len(names)) for names in members)


# --- hyper-parameters ------------------------------------------------------------------------------------------------


def set_hyperparameters(state, groups):
    """Set lr and all other hyper-parameters of each param group."""
    for group, saved in zip(state.optimizer.param_groups, groups, strict=True):
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
        return current.fill_(value)  # in place: a captured graph, or a scheduler, holds this tensor
    if isinstance(value, list) and isinstance(current, tuple):
        return tuple(_like(old, new) for old, new in zip(current, value, strict=True))
    return value
