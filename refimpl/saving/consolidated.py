"""Puts the shards of all ranks together on rank 0, and distributes them again.

One tensor at a time goes from its owners to rank 0, or from rank 0 to all, through host memory. Only rank 0 keeps the
result there: 4Ψ + 8Ψ bytes with Adam in fp32. If every rank kept it, a machine with N ranks would need N times that.
"""

import json
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..comm.texts import broadcast_text, gather_results
from ..sharding import ShardSpec, copy_overlap
from .description import describe, differences, listed, located, set_hyperparameters
from .dtype_names import DTYPES, name_of
from .durable import make_folder, replacing, widest_first, write_tensors
from .manifest import SavedStateError
from .optimizer_state import elements, flat, kind_of, make_state, tensors_of
from .raise_on_all import validate_on_all
from .rank_tensors import gather_own, scatter_own
from .schema import KIND, STATE_DICT, Each, mismatch
from .sharded import compare_values
from .validity import faults

if TYPE_CHECKING:
    from os import PathLike

    from .training_state import TrainingState


def state_dict(state: "TrainingState") -> dict[str, Any]:
    """Return the whole of a `TrainingState` on rank 0, in host memory; {} on the others. All ranks call it, between
    steps. Raises what `save` raises.

    - "model": {name: tensor} with the names of the model's own state_dict; 16-bit parameters as their fp32 masters
    - "optimizer": {name: {"exp_avg": tensor of the parameter's shape, "step": …, …}}; "class": the optimizer's
    - "param_groups": [{"params": names, "lr": …}]; "step": the number of steps so far
    - "own", if ranks have any: what belongs to each alone (`TrainingState.own`)
    """
    description, reports = describe(state, saving=True)
    model, optimizer = {}, {name: {} for name in description["parameters"]}
    wanted = _tensors(description, _in_order(reports))
    for (name, key, _, _), whole in zip(wanted, _gathered(state, description, reports, wanted), strict=True):
        if state.comm.rank == 0 and "/" in key:
            optimizer[name][key.partition("/")[2]] = whole
        else:
            model[name] = whole
    own = gather_own(state)
    if state.comm.rank:
        return {}
    for name, kinds in description["states"].items():
        optimizer[name] = {key: _number(kind) if "value" in kind else optimizer[name][key]
                           for key, kind in kinds.items()}
    return {"model": {name: model[known] for name, known in _names(reports).items()},
            "optimizer": optimizer, "class": description["optimizer"], "step": description["step"],
            "param_groups": [{"params": group["parameters"], **group["hyperparameters"]}
                             for group in description["groups"]], **({"own": own} if own else {})}


def load_state_dict(state: "TrainingState", sd: dict[str, Any]) -> int:
    """Load what `state_dict` returned, on any number of ranks, however they cut the model; return the step. All ranks
    call it; rank 0's `sd` counts, the others may pass {}. Masters and 16-bit parameters as after `load`.

    SavedStateError on all ranks, before anything is changed, for another model, optimizer or param groups.
    """
    comm, texts = state.comm, []
    here, reports = describe(state)

    def read():
        if comm.rank == 0:
            texts.append(json.dumps(_describe_state_dict(sd, _names(reports), here["defaults"])))

    validate_on_all(comm, read)
    description = json.loads(broadcast_text(comm, *texts))

    def fits():
        if found := differences(description, here) or faults(state.optimizer, description):
            raise SavedStateError(f"the state_dict does not fit what is trained here: {listed(found)}")

    validate_on_all(comm, fits)
    scatter_own(state, sd.get("own"), check=True)  # before anything is changed
    set_hyperparameters(state, description["groups"])
    scatter_own(state, sd.get("own"))
    _scatter(state, sd, description, _tensors(description, _in_order(reports)))
    return description["step"]


def save_weights(state: "TrainingState", path: "str | PathLike[str]", dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the whole model to one safetensors file, for the plain `nn.Module`, floats in `dtype` (None: the model's
    own).

    Rank 0 writes it, a tensor at a time, under a temporary name, and renames it when it is on the disk. A tensor with
    several names is written once: load it by `safetensors.torch.load_model(model, path)` or by
    `model.load_state_dict(load_file(path), strict=False)`. Masters are rounded once, from fp32. All ranks call it.
    RuntimeError, before anything is written, if replicas have other values.
    """
    comm, path = state.comm, Path(path)
    description, reports = describe(state)
    compare_values(state, reports)  # a save compares them as it writes; here nothing else does
    own = {name: DTYPES[about["dtype"]] for kind in ("rest", "parameters") for name, about in description[kind].items()}
    written = {name: dtype if dtype and each.is_floating_point else each for name, each in own.items()}
    wanted = widest_first(_tensors({**description, "states": {}}, _in_order(reports)), lambda each: written[each[0]])
    specs = [(name, written[name], shape) for name, _, _, shape in wanted]
    tensors = (whole if comm.rank else whole.to(to) for (_, to, _), whole in
               zip(specs, _gathered(state, description, reports, wanted), strict=True))

    def write():
        try:
            if comm.rank == 0:
                make_folder(path.absolute().parent)
                with replacing(path) as temporary:
                    write_tensors(temporary, specs, tensors, {"format": "pt"})
        finally:
            deque(tensors, maxlen=0)  # after an error, take what the other ranks are going to send

    gather_results(comm, write)


# --- one tensor ------------------------------------------------------------------------------------------------------


def _in_order(reports):
    """Return all names in an order in which, on each rank, those of one group follow each other, as far as possible."""
    place = {}
    for report in reports:
        for name, each in report["places"]:
            place[name] = min(each, place.get(name, each))
    return sorted(place, key=place.get)


def _names(reports):
    """Return {each name in the model's state_dict: the tensor's name in specs}, on all ranks."""
    return {name: known for report in reports for name, known in report["names"].items()}


def _tensors(description, names):
    """Return [(name, key, dtype, shape)] of all tensors to be moved, those of one name together."""
    found = []
    for name in names:
        about = description["parameters"].get(name) or description["rest"][name]
        found.append((name, "parameters" if "held" in about else "rest", about.get("held") or about["dtype"]))
        found += [(name, f"optimizer/{key}", kind["dtype"])
                  for key, kind in description["states"].get(name, {}).items() if "value" not in kind]
    shapes = {**description["rest"], **description["parameters"]}
    return [(name, key, DTYPES[dtype], tuple(shapes[name]["shape"])) for name, key, dtype in found]


def _gathered(state, description, reports, wanted):
    """Yield each tensor of `wanted` whole, on rank 0; None on the others, which send the parts that they own of it."""
    comm, host, mine = state.comm, state.comm.host(), {part: shard for shard, part in state.written.items()}
    found = located({**description["rest"], **description["parameters"]},
                    {rank: report["pieces"] for rank, report in enumerate(reports)})
    with state.one_group() as load:
        for name, key, dtype, shape in wanted:
            whole = None if comm.rank else torch.zeros(shape, dtype=dtype)  # N copies may not fit a machine
            for rank, part, spec in found.get(name, ()):
                if rank == comm.rank:
                    load(mine[part].group)
                    own = elements(tensors_of(state, mine[part])[key], mine[part])
                    if rank:
                        host.send(own.cpu(), 0)
                elif comm.rank == 0:
                    own = host.recv(torch.empty(spec.numel, dtype=dtype), rank)
                if comm.rank == 0:
                    copy_overlap(whole.view(-1), ShardSpec(name, shape), own, spec)
            yield whole
            del whole  # before the next one is made


@torch.no_grad()
def _scatter(state, sd, description, wanted):
    """Broadcast each tensor of `wanted` from rank 0; each rank keeps the elements that it holds."""
    comm, host, mine, made = state.comm, state.comm.host(), state.by_name, set()
    with state.one_group() as load:
        for name, key, dtype, shape in wanted:
            whole = torch.zeros(shape, dtype=dtype)
            if comm.rank == 0:
                whole.copy_(sd["optimizer"][name][key.partition("/")[2]] if "/" in key else sd["model"][name])
            host.broadcast(whole, 0, out=whole)
            for shard in mine.get(name, ()):
                load(shard.group)
                if shard not in made:
                    made.add(shard)
                    make_state(state, shard, description["states"].get(name))
                with flat(tensors_of(state, shard)[key]) as target:
                    copy_overlap(target, shard.spec, whole.view(-1), ShardSpec(name, shape))


# --- what a state_dict describes -------------------------------------------------------------------------------------


def _describe_state_dict(sd, known, defaults):
    """Return the description of a state_dict, with its states. `known`: {each name of a tensor: the one in specs}."""
    if wrong := mismatch(sd, STATE_DICT):
        raise SavedStateError(f"rank 0's state_dict cannot be loaded: {wrong}: expected what state_dict "
                              "returned")
    model, trained = sd["model"], sd["optimizer"]
    if unknown := [name for name in trained if name not in model and name not in known]:
        raise SavedStateError(f"rank 0's state_dict has an optimizer state of {unknown[0]}, which is not in its model")
    names = {name: first for name, first in known.items() if name in model}
    shapes = {name: {"shape": list(x.shape), "dtype": name_of(x.dtype)}
             for name, x in model.items() if names.get(name, name) == name}
    groups = [{"parameters": list(group["params"]),
               "hyperparameters": {key: value for key, value in group.items() if key != "params"}}
              for group in sd["param_groups"]]
    try:
        states = {name: {key: kind_of(key, value, model[name].shape, name) for key, value in state.items()}
                  for name, state in trained.items() if name in model}
    except TypeError as error:
        raise SavedStateError(f"rank 0's state_dict: {error}") from None
    if wrong := mismatch(states, Each(Each(KIND))):
        raise SavedStateError(f"rank 0's state_dict has an optimizer state that cannot be: {wrong}")
    _check_kinds(states, model)
    return {"optimizer": sd["class"], "groups": groups, "step": sd["step"], "defaults": defaults,
            "states": states,
            "parameters": {name: {**each, "held": each["dtype"]} for name, each in shapes.items() if name in trained},
            "rest": {name: each for name, each in shapes.items() if name not in trained}}


def _check_kinds(states, model):
    """Raise SavedStateError for a key under which one parameter has a number for each element, another a single one.
    (A parameter of one element has both; and there may be nothing yet, None.)"""
    first = {}
    for name, state in states.items():
        for key, kind in state.items():
            if kind.get("value", 0) is None or model[name].numel() <= 1 and "dtype" in kind:
                continue
            other = first.setdefault(key, name)
            if ("value" in kind) != ("value" in states[other][key]):
                raise SavedStateError(f"rank 0's state_dict has {key} of {name} as {kind}, and of {other} as "
                                      f"{states[other][key]}: expected a tensor of each parameter's shape, or one "
                                      "number for each")


def _number(kind):
    return torch.tensor(kind["value"], dtype=DTYPES[kind["dtype"]]) if "dtype" in kind else kind["value"]
