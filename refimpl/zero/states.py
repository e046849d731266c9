"""An optimizer's state by pieces, whatever the optimizer keeps.

Of a parameter it is, by key, a tensor of the parameter's shape (exp_avg, momentum_buffer), of which each rank has a
piece, or one number for all of it (step), which all ranks have. Anything else cannot be cut.
"""

import torch

from ..memory import mark
from .recipe import name_of

NUMBERS = ("step", "mu_product", "eta", "mu")  # what torch's optimizers call a number that they keep in a tensor


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
    """What the optimizer's state `value` under `key` is, of the parameter `name`; `own`: what the optimizer updates."""
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
