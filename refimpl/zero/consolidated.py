"""The shards of all ranks put together on rank 0, and shared out again.

Buckets are gathered one at a time, each tensor of the optimizer's state by itself: what is on its way is a bucket,
or two. Only rank 0 keeps the result, in host memory: with Adam in fp32 4Ψ + 8Ψ bytes. On every rank it would be N times
that on one machine.
"""

import json
from collections import deque
from pathlib import Path

import torch

from .agreement import agreed, check_phase, told_by_first
from .checkpoint import accepted, check_no_gradients
from .durable import make_folder, replace, widest_first, write_tensors
from .manifest import CheckpointError
from .recipe import describe, differences, listed, name_of, rest_of, set_hyperparameters
from .states import elements, kind_of, merged, places, states_of


def state_dict(engine):
    """On rank 0, in host memory; {} on the others. All ranks call it, between steps.

    - "model": {name: tensor} with the names of the model's own state_dict; of 16-bit parameters the fp32 masters
    - "optimizer": {name: {"exp_avg": tensor of the parameter's shape, "step": …, …}}; "class": the optimizer's
    - "param_groups": [{"params": names, "lr": …}]; "step": how many there were

    RuntimeError on all ranks if there are gradients, as for `save`.
    """
    comm = engine.comm
    check_phase(comm, "state_dict", engine._steps, engine._micro_batches)
    check_no_gradients(engine, "state_dict")
    recipe, states = describe(engine), merged(agreed(comm, lambda: states_of(engine)))
    model, optimizer = {}, {name: {} for name in recipe["parameters"]}
    for bucket in engine.buckets:
        for key, dtype in _keys(bucket, recipe, states):
            _collect(engine, bucket, key, dtype, states, model, optimizer)
    if comm.rank:
        return {}
    for name, state in states.items():
        optimizer[name] = {key: _number(kind) if "value" in kind else optimizer[name][key]
                           for key, kind in state.items()}
    model |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in rest_of(engine).items()}
    return {"model": {name: model[first] for name, first in _names(engine.model).items()},
            "optimizer": optimizer, "class": recipe["optimizer"], "step": recipe["step"],
            "param_groups": [{"params": group["parameters"], **group["hyperparameters"]}
                             for group in recipe["groups"]]}


def load_state_dict(engine, sd):
    """Go on from what `state_dict` gave, at any stage and on any number of ranks; gradients go. All ranks call it;
    rank 0's `sd` counts, the others may give {}.

    CheckpointError on all ranks, before anything is changed, for another model, optimizer or param groups.
    """
    comm = engine.comm
    check_phase(comm, "load_state_dict", engine._steps, engine._micro_batches)
    texts = []
    accepted(comm, lambda: texts.append(json.dumps(_described(engine, sd))) if comm.rank == 0 else None)
    recipe, states = json.loads(told_by_first(comm, *texts))
    if found := differences(recipe, describe(engine)):
        raise CheckpointError(f"the state_dict is of something else: {listed(found)}")
    engine.zero_grad()
    set_hyperparameters(engine, recipe["groups"])
    wanted = places(engine, states)
    with torch.no_grad():
        for bucket in engine.buckets:
            for key, dtype in _keys(bucket, recipe, states):
                _scatter(engine, bucket, key, dtype, sd, wanted)
        if comm.rank == 0:
            for name, tensor in rest_of(engine).items():
                tensor.copy_(sd["model"][name])
    engine._broadcast_rest()
    engine._steps = recipe["step"]
    engine._loaded()


def save_weights(engine, path, dtype=torch.bfloat16):
    """One safetensors file of the whole model for the plain `nn.Module`, floats in `dtype` (None: the model's own).

    Rank 0 writes it, a bucket at a time, to a temporary name, and renames it when it is on the disk. A tensor with
    several names is written once: `safetensors.torch.load_model(model, path)` knows, and so does
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
                write_tensors(f"{path}.tmp", specs, tensors, {"format": "pt"})
                replace(f"{path}.tmp", path)
        finally:
            deque(tensors, maxlen=0)  # gathers that are left: the other ranks are in them

    agreed(comm, write)


def _bucket_batches(engine, dtype):
    recipe = describe(engine)
    for bucket in engine.buckets:
        held = getattr(torch, recipe["parameters"][bucket.slots[0].name]["held"])
        named = [(slot.name, dtype or bucket.dtype, tuple(slot.parameter.shape)) for slot in bucket.slots]
        yield named, lambda bucket=bucket, held=held: bucket.views(_gathered(engine, bucket, None, held))


def _rest_batches(engine, dtype):
    for name, tensor in rest_of(engine).items():
        to = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        yield [(name, to, tuple(tensor.shape))], lambda tensor=tensor: [tensor.detach()]


# --- one bucket ------------------------------------------------------------------------------------------------------


def _keys(bucket, recipe, states):
    """[(key, dtype)] of what there is of a bucket's parameters for each element; key None are they themselves."""
    kinds = {(key, kind["dtype"]): None for slot in bucket.slots for key, kind in states.get(slot.name, {}).items()
             if "value" not in kind}
    return [(key, getattr(torch, dtype)) for key, dtype in
            [(None, recipe["parameters"][bucket.slots[0].name]["held"]), *kinds]]


def _collect(engine, bucket, key, dtype, states, model, optimizer):
    """Put what there is of one bucket into rank 0's `model` or `optimizer`."""
    whole = _gathered(engine, bucket, key, dtype)
    if engine.comm.rank:
        return
    for slot, view in zip(bucket.slots, bucket.views(whole), strict=True):
        if key is None:
            model[slot.name] = view.to("cpu", copy=True)
        elif states.get(slot.name, {}).get(key) == {"dtype": name_of(dtype)}:
            optimizer[slot.name][key] = view.to("cpu", copy=True)


def _gathered(engine, bucket, key, dtype):
    """The flat tensor of a bucket, of parameters or of one kind of state, on every rank; 0 where there is none."""
    shard = torch.zeros(bucket.shard_numel, dtype=dtype, device=bucket.device)
    for piece, own in engine._shared_out()[bucket]:
        held = own if key is None else engine.optimizer.state.get(own, {}).get(key)
        if held is not None and held.dtype == dtype:
            shard[piece.place : piece.place + piece.end - piece.first] = elements(held, own, piece)
    return engine.comm.all_gather(shard)


def _scatter(engine, bucket, key, dtype, sd, wanted):
    """Rank 0's tensors to all; each keeps what it holds."""
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


# --- what a state_dict is of -----------------------------------------------------------------------------------------


def _described(engine, sd):
    """(recipe, states) of a state_dict, as `describe` and `merged` give them of an engine."""
    missing = [key for key in ("model", "optimizer", "class", "step", "param_groups") if key not in sd]
    if missing:
        raise CheckpointError(f"rank 0's state_dict has no {missing[0]!r}: expected what engine.state_dict() gave")
    model, trained = sd["model"], sd["optimizer"]
    names = {name: first for name, first in _names(engine.model).items() if name in model}
    looks = {name: {"shape": list(x.shape), "dtype": name_of(x.dtype)}
             for name, x in model.items() if names.get(name, name) == name}
    groups = [{"parameters": list(group["params"]),
               "hyperparameters": {key: value for key, value in group.items() if key != "params"}}
              for group in sd["param_groups"]]
    states = {name: {key: kind_of(key, value, model[name], name) for key, value in state.items()}
              for name, state in trained.items() if name in model}
    return {"optimizer": sd["class"], "groups": groups, "step": sd["step"],
            "parameters": {name: {**look, "held": look["dtype"]} for name, look in looks.items() if name in trained},
            "rest": {name: look for name, look in looks.items() if name not in trained}}, states


def _number(kind):
    return torch.tensor(kind["value"], dtype=getattr(torch, kind["dtype"])) if "dtype" in kind else kind["value"]


def _names(model):
    """{each name in the model's state_dict: the first name of the same tensor}."""
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first = {}
    for name, tensor in every:
        first.setdefault(tensor, name)
    kept = model.state_dict().keys()
    return {name: first[tensor] for name, tensor in every if name in kept}
