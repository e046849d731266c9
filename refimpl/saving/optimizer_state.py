"""The tensors of a shard: its values, and what the optimizer keeps of them.

An optimizer keeps values by key for each parameter: a tensor of the parameter's shape (exp_avg, momentum_buffer), which
is cut as the parameter is, or one number for all of it (step), which all ranks have. Anything else cannot be cut.
"""

import contextlib

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..common.marks import mark
from .dtype_names import DTYPES, name_of

PLAIN = torch.Tensor, torch.nn.Parameter, FakeTensor  # others have bytes of their own, such as blocks and their scales
NUMBERS = ("step", "mu_product", "eta", "mu")  # keys under which torch's optimizers keep a number in a tensor


def tensors_of(state, shard):
    """Return {key: tensor} of all that is saved of a shard, by the key that files have: "parameters" or "rest", and
    "optimizer/exp_avg", …"""
    if shard.own is None:
        return {"rest": shard.values}
    kept = state.optimizer.state.get(shard.own, {})
    return {"parameters": shard.values} | {f"optimizer/{key}": kept[key] for key, kind in state_of(state, shard).items()
                                           if "value" not in kind}


def elements(tensor, shard):
    """Return the elements that this rank owns, flat, of one of a shard's tensors."""
    begin = shard.owned.first - shard.spec.first
    return tensor.detach().reshape(-1)[begin : begin + shard.owned.numel]


@contextlib.contextmanager
def flat(tensor):
    """Give a tensor's elements, flat, to be written. Of one that is not contiguous it is a copy, written back."""
    elements = tensor.detach().reshape(-1)
    yield elements
    if not tensor.is_contiguous():
        tensor.detach().copy_(elements.view(tensor.shape))


def state_of(state, shard):
    """Return {key: kind} of a shard's optimizer state. A kind is {"dtype"} for a tensor with a number for each element,
    {"value"} for one number, with a "dtype" if that is in a tensor. TypeError for anything else."""
    return {key: kind_of(key, value, shard.own.shape, shard.spec.name)
            for key, value in state.optimizer.state.get(shard.own, {}).items()}


def kind_of(key, value, shape, name):
    """Return the kind of one value of the optimizer's state of `name`; `shape`: of what the optimizer updates."""
    if value is None or isinstance(value, (bool, int, float)):
        return {"value": value}
    plain = type(value) in PLAIN
    if plain and value.shape == shape and key not in NUMBERS:
        return {"dtype": name_of(value.dtype)}
    if plain and value.numel() == 1:
        return {"dtype": name_of(value.dtype), "value": value.item()}
    shown = f"shape {tuple(value.shape)}" if plain else f"a {type(value).__name__}"
    raise TypeError(f"the optimizer's state {key!r} of {name} is {shown}: expected a number, or a tensor of the shape "
                    f"{tuple(shape)}, which can be cut into pieces")


def make_state(state, shard, kinds):
    """Give a shard's optimizer state the keys, dtypes and numbers of `kinds`, no more and no less; tensors are there to
    be written. No-op for what is not trained."""
    if shard.own is None:
        return
    if not kinds:  # saved before its first step, or without a state
        state.optimizer.state.pop(shard.own, None)
        return
    held, own = state.optimizer.state[shard.own], shard.own
    for key in [key for key in held if key not in kinds]:
        del held[key]
    for key, kind in kinds.items():
        dtype, now = DTYPES[kind["dtype"]] if "dtype" in kind else None, held.get(key)
        if "value" not in kind:
            # else the tensor that is there is written to: a store may know it
            if not isinstance(now, torch.Tensor) or now.dtype != dtype or now.shape != own.shape:
                held[key] = mark(torch.zeros_like(own, dtype=dtype, requires_grad=False), "optimizer state")
        elif dtype is None:
            held[key] = kind["value"]
        else:  # on the device on which torch's Optimizer.load_state_dict puts it
            group = next(group for group in state.optimizer.param_groups if any(own is p for p in group["params"]))
            on_device = key != "step" or group.get("capturable") or group.get("fused")
            held[key] = torch.tensor(kind["value"], dtype=dtype, device=own.device if on_device else "cpu")
