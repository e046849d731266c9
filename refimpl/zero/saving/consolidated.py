"""Puts the shards of all ranks together on rank 0, and distributes them again.

Buckets are gathered one at a time, and each tensor of the optimizer's state by itself, so one or two buckets are in
flight. Only rank 0 keeps the result, in host memory: 4Ψ + 8Ψ bytes with Adam in fp32. If every rank kept it, a machine
with N ranks would need N times that.
"""

import json
from collections import deque
from pathlib import Path

import torch

from ...comm.texts import broadcast_text, gather_results
from ..internals.consistency import check_phase
from .description import DTYPES, describe, differences, listed, name_of, set_hyperparameters
from .durable import make_folder, replacing, widest_first, write_tensors
from .form import KIND, STATE_DICT, Each, mismatch
from .manifest import SavedStateError
from .optimizer_state import elements, kind_of, load_targets, merge_states, states_of
from .rest import rest_of
from .sharded import check_no_gradients, validate_on_all


def state_dict(engine):
    """Return the whole state on rank 0, in host memory; {} on the others. All ranks call it, between steps.

    - "model": {name: tensor} with the names of the model's own state_dict; 16-bit parameters as their fp32 masters
    - "optimizer": {name: {"exp_avg": tensor of the parameter's shape, "step": …, …}}; "class": the optimizer's
    - "param_groups": [{"params": names, "lr": …}]; "step": the number of steps so far

    RuntimeError on all ranks if there are gradients, as for `save`.
    """
    comm = engine.comm
    check_phase(comm, "state_dict", engine._steps, engine._micro_batches)
    check_no_gradients(engine, "state_dict")
    description, states = describe(engine), merge_states(gather_results(comm, lambda: states_of(engine)))
    model, optimizer = {}, {name: {} for name in description["parameters"]}
    for bucket in engine.buckets:
        for key, dtype in _keys(bucket, description, states):
            _collect(engine, bucket, key, dtype, states, model, optimizer)
    for bucket in engine.frozen_buckets:
        whole = comm.all_gather(engine.shards[bucket])
        if not comm.rank:
            model |= {slot.name: slot.view(whole).to("cpu", copy=True) for slot in bucket.slots}
    if comm.rank:
        return {}
    for name, state in states.items():
        optimizer[name] = {key: _number(kind) if "value" in kind else optimizer[name][key]
                           for key, kind in state.items()}
    model |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in rest_of(engine).items()}
    return {"model": {name: model[first] for name, first in _names(engine.model).items()},
            "optimizer": optimizer, "class": description["optimizer"], "step": description["step"],
            "param_groups": [{"params": group["parameters"], **group["hyperparameters"]}
                             for group in description["groups"]]}


def load_state_dict(engine, sd):
    """Load what `state_dict` returned, at any stage and on any number of ranks. Gradients are dropped. All ranks call
    it; rank 0's `sd` counts, the others may pass {}.

    SavedStateError on all ranks, before anything is changed, for another model, optimizer or param groups.
    """
    comm = engine.comm
    check_phase(comm, "load_state_dict", engine._steps, engine._micro_batches)
    texts = []

    def read():
        if comm.rank == 0:
            texts.append(json.dumps(_describe_state_dict(engine, sd)))

    validate_on_all(comm, read)
    description, states = json.loads(broadcast_text(comm, *texts))
    if found := differences(description, describe(engine)):
        raise SavedStateError(f"the state_dict does not fit this engine: {listed(found)}")
    engine.zero_grad()
    set_hyperparameters(engine, description["groups"])
    wanted = load_targets(engine, states)
    with torch.no_grad():
        for bucket in engine.buckets:
            for key, dtype in _keys(bucket, description, states):
                _scatter(engine, bucket, key, dtype, sd, wanted)
        if comm.rank == 0:
            for name, tensor in rest_of(engine).items():
                tensor.copy_(sd["model"][name])
        for bucket in engine.frozen_buckets:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            for slot in bucket.slots if comm.rank == 0 else ():
                slot.view(flat).copy_(sd["model"][slot.name])
            comm.broadcast(flat, 0, out=flat)
            engine.shards[bucket].copy_(bucket.shard(flat, comm.rank))
    engine._broadcast_rest()
    engine._steps = description["step"]
    engine._after_load()


def save_weights(engine, path, dtype=torch.bfloat16):
    """Write the whole model to one safetensors file, for the plain `nn.Module`, floats in `dtype` (None: the model's
    own).

    Rank 0 writes it, a bucket at a time, under a temporary name, and renames it when it is on the disk. A tensor with
    several names is written once: load it by `safetensors.torch.load_model(model, path)` or by
    `model.load_state_dict(load_file(path), strict=False)`. Masters are rounded once, from fp32. All ranks call it.
    """
    comm, path = engine.comm, Path(path)
    check_phase(comm, "save_weights", engine._steps, engine._micro_batches)
    batches = [*_bucket_batches(engine, dtype), *_rest_batches(engine, dtype)]
    batches = widest_first(batches, lambda batch: batch[0][0][1])
    specs = [spec for named, _ in batches for spec in named]
    tensors = (whole.to(to) for named, get in batches for whole, (_, to, _) in zip(get(), named, strict=True))

    def write():
        try:
            if comm.rank == 0:
                make_folder(path.absolute().parent)
                with replacing(path) as temporary:
                    write_tensors(temporary, specs, tensors, {"format": "pt"})
        finally:
            deque(tensors, maxlen=0)  # after an error, make the remaining gathers, in which the other ranks wait

    gather_results(comm, write)


def _bucket_batches(engine, dtype):
    description = describe(engine)
    for bucket in engine.buckets:
        held = DTYPES[description["parameters"][bucket.slots[0].name]["held"]]
        named = [(slot.name, dtype or bucket.dtype, tuple(slot.parameter.shape)) for slot in bucket.slots]
        yield named, lambda bucket=bucket, held=held: bucket.views(_gathered(engine, bucket, None, held))
    for bucket in engine.frozen_buckets:
        to = dtype if dtype and bucket.dtype.is_floating_point else bucket.dtype
        named = [(slot.name, to, tuple(slot.parameter.shape)) for slot in bucket.slots]
        yield named, lambda bucket=bucket: bucket.views(engine.comm.all_gather(engine.shards[bucket]))


def _rest_batches(engine, dtype):
    for name, tensor in rest_of(engine).items():
        to = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        yield [(name, to, tuple(tensor.shape))], lambda tensor=tensor: [tensor.detach()]


# --- one bucket ------------------------------------------------------------------------------------------------------


def _keys(bucket, description, states):
    """Return [(key, dtype)] of the tensors that a bucket's parameters have: None for themselves, then their states."""
    kinds = {(key, kind["dtype"]): None for slot in bucket.slots for key, kind in states.get(slot.name, {}).items()
             if "value" not in kind}
    return [(key, DTYPES[dtype]) for key, dtype in
            [(None, description["parameters"][bucket.slots[0].name]["held"]), *kinds]]


def _collect(engine, bucket, key, dtype, states, model, optimizer):
    """Gather one tensor of a bucket, and put its parts into rank 0's `model` or `optimizer`."""
    whole = _gathered(engine, bucket, key, dtype)
    if engine.comm.rank:
        return
    for slot, view in zip(bucket.slots, bucket.views(whole), strict=True):
        if key is None:
            model[slot.name] = view.to("cpu", copy=True)
        elif states.get(slot.name, {}).get(key) == {"dtype": name_of(dtype)}:
            optimizer[slot.name][key] = view.to("cpu", copy=True)


def _gathered(engine, bucket, key, dtype):
    """Return a bucket's parameters or one tensor of its states, flat, on every rank; 0 where there is none."""
    shard = torch.zeros(bucket.shard_numel, dtype=dtype, device=bucket.device)
    for piece, own in engine._owned_pieces()[bucket]:
        held = own if key is None else engine.optimizer.state.get(own, {}).get(key)
        if isinstance(held, torch.Tensor) and held.dtype == dtype:
            shard[piece.place : piece.place + piece.end - piece.first] = elements(held, own, piece)
    return engine.comm.all_gather(shard)


def _scatter(engine, bucket, key, dtype, sd, wanted):
    """Broadcast one tensor of a bucket from rank 0; each rank keeps the elements that it holds."""
    flat = torch.zeros(bucket.numel, dtype=dtype, device=bucket.device)
    if engine.comm.rank == 0:
        for slot, view in zip(bucket.slots, bucket.views(flat), strict=True):
            tensor = sd["model"][slot.name] if key is None else sd["optimizer"].get(slot.name, {}).get(key)
            if isinstance(tensor, torch.Tensor) and tensor.dtype == dtype and tensor.shape == view.shape:
                view.copy_(tensor)
    engine.comm.broadcast(flat, 0, out=flat)
    for slot in bucket.slots:
        piece, targets = wanted.get(slot.name, (None, {}))
        target = targets.get("parameters" if key is None else f"optimizer/{key}")
        if target is not None and target.dtype == dtype:
            target.copy_(flat[slot.first + piece.first : slot.first + piece.end])


# --- what a state_dict describes -------------------------------------------------------------------------------------


def _describe_state_dict(engine, sd):
    """Return (description, states) of a state_dict, as `describe` and `merge_states` return them of an engine."""
    if wrong := mismatch(sd, STATE_DICT):
        raise SavedStateError(f"rank 0's state_dict cannot be loaded: {wrong}: expected what engine.state_dict() "
                              "returned")
    model, trained = sd["model"], sd["optimizer"]
    known = _names(engine.model)
    if unknown := [name for name in trained if name not in model and name not in known]:
        raise SavedStateError(f"rank 0's state_dict has an optimizer state of {unknown[0]}, which is not in its model")
    names = {name: first for name, first in known.items() if name in model}
    shapes = {name: {"shape": list(x.shape), "dtype": name_of(x.dtype)}
             for name, x in model.items() if names.get(name, name) == name}
    groups = [{"parameters": list(group["params"]),
               "hyperparameters": {key: value for key, value in group.items() if key != "params"}}
              for group in sd["param_groups"]]
    try:
        states = {name: {key: kind_of(key, value, model[name], name) for key, value in state.items()}
                  for name, state in trained.items() if name in model}
    except TypeError as error:
        raise SavedStateError(f"rank 0's state_dict: {error}") from None
    if wrong := mismatch(states, Each(Each(KIND))):
        raise SavedStateError(f"rank 0's state_dict has an optimizer state that cannot be: {wrong}")
    _check_kinds(states, model)
    return {"optimizer": sd["class"], "groups": groups, "step": sd["step"], "defaults": describe(engine)["defaults"],
            "parameters": {name: {**each, "held": each["dtype"]} for name, each in shapes.items() if name in trained},
            "rest": {name: each for name, each in shapes.items() if name not in trained}}, states


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


def _names(model):
    """Return {each name in the model's state_dict: the first name of the same tensor}."""
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first = {}
    for name, tensor in every:
        first.setdefault(tensor, name)
    kept = model.state_dict().keys()
    return {name: first[tensor] for name, tensor in every if name in kept}
