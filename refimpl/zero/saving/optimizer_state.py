"""Cuts the state of any optimizer into pieces.

An optimizer keeps values by key for each parameter: a tensor of the parameter's shape (exp_avg, momentum_buffer), of
which each rank has a piece, or one number for all of it (step), which all ranks have. Anything else cannot be cut.
"""

import torch

from ...memory import mark
from .description import DTYPES, name_of

NUMBERS = ("step", "mu_product", "eta", "mu")  # keys under which torch's optimizers keep a number in a tensor


def elements(tensor, own, piece):
    """Return the elements of `piece`, flat, from `tensor`. It is laid out as `own`, what the optimizer updates: that is
    the piece itself, or the whole parameter."""
    flat = tensor.detach().view(-1)
    return flat[piece.first : piece.end] if own is piece.slot.parameter else flat


def states_of(engine):
    """Return {parameter: {key: kind}} of this rank's pieces. A kind is {"dtype"} for a tensor with a number for each
    element, {"value"} for one number, with a "dtype" if that is in a tensor. TypeError for anything else."""
    return {piece.slot.name: state_of(engine, piece, own)
            for pairs in engine._owned_pieces().values() for piece, own in pairs}


def state_of(engine, piece, own):
    """Return {key: kind} of one piece."""
    return {key: kind_of(key, value, own, piece.slot.name)
            for key, value in engine.optimizer.state.get(own, {}).items()}


def kind_of(key, value, own, name):
    """Return the kind of one value of the optimizer's state; `own`: what the optimizer updates, `name`: its name."""
    if value is None or isinstance(value, (bool, int, float)):
        return {"value": value}
    if isinstance(value, torch.Tensor):
        if value.shape == own.shape and key not in NUMBERS:
            return {"dtype": name_of(value.dtype)}
        if value.numel() == 1:
            return {"dtype": name_of(value.dtype), "value": value.item()}
    shown = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise TypeError(f"the optimizer's state {key!r} of {name} is {shown}: expected a number, or a tensor of the shape "
                    f"{tuple(own.shape)}, which can be cut into pieces")


def merge_states(ranks):
    """Merge what `states_of` returned on each rank. RuntimeError if two ranks differ in one parameter."""
    found = {}
    for rank, states in enumerate(ranks):
        for name, state in states.items():
            if found.setdefault(name, state) != state:
                raise RuntimeError(f"rank {rank} has another optimizer state of {name} than ranks before it: {state}, "
                                   f"{found[name]}")
    return found


def load_targets(engine, states):
    """Return {parameter: (Piece, {key: flat tensor})}: the tensors to load this rank's values into. Before that, the
    optimizer's state gets the keys, dtypes and numbers of `states`. Keys are "parameters", "optimizer/exp_avg", …"""
    group_of = {own: group for group in engine.param_groups for own in group["params"]}
    found = {}
    for pairs in engine._held_pieces().values():
        for piece, own in pairs:
            state = states.get(piece.slot.name)
            views = {} if not state else _make(engine.optimizer.state[own], own, state, group_of[own])
            if not state:
                engine.optimizer.state.pop(own, None)
            found[piece.slot.name] = piece, {key: elements(x, own, piece) for key, x in
                                             {"parameters": own, **views}.items()}
    return found


def _make(held, own, state, group):
    """Give `held`, the optimizer's state of `own`, the keys of `state`; return {key: tensor to load values into}."""
    found = {}
    for key in [key for key in held if key not in state]:
        del held[key]
    for key, kind in state.items():
        dtype = DTYPES[kind["dtype"]] if "dtype" in kind else None
        if "value" not in kind:
            now = held.get(key)
            if not isinstance(now, torch.Tensor) or now.dtype != dtype or now.shape != own.shape:
                held[key] = mark(torch.zeros_like(own, dtype=dtype, requires_grad=False), "optimizer state")
            found[f"optimizer/{key}"] = held[key]
        elif dtype is None:
            held[key] = kind["value"]
        else:  # on the device on which torch's Optimizer.load_state_dict puts it
            on_device = key != "step" or group.get("capturable") or group.get("fused")
            held[key] = torch.tensor(kind["value"], dtype=dtype, device=own.device if on_device else "cpu")
    return found
