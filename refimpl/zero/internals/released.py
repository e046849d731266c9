"""Parameters that are in shards for now: who reads one is served, or told its name; nobody reads what is not there.

A parameter's tensor stays the same object while its elements come and go. While they are away its class is `Released`,
whose `__torch_function__` sees each use of it from Python, by whatever name or list it was found: a head that is tied
by `F.linear(x, self.embedding.weight)`, a penalty over `self.parameters()`, a `functional_call`. Shapes, dtypes and
hooks are told; for all else `served` gathers it. Other tensors are not slowed down.

Not seen is what torch calls no `__torch_function__` for: `torch.tensor(p)`, DLPack, and the transforms of torch.func on
a parameter itself (`vmap(f)(p)`). These read NaN.
"""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}  # attributes that show elements
ASKED = {"size", "dim", "numel", "stride", "element_size", "storage_offset", "nelement", "ndimension", "get_device",
         "untyped_storage", "data_ptr", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
         "retain_grad", "__hash__", "__len__"}  # and is_contiguous, is_complex, _is_view, …


class Released:
    """A parameter whose elements are away. `release` makes one of a Parameter, and `restore` a Parameter again."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _asks(func):
            for x in pytree.tree_leaves((args, kwargs)):
                if isinstance(x, Released):
                    x._served()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self):
        return f"Parameter of shape {tuple(self.shape)}, in shards"


class ReleasedParameter(Released, nn.Parameter):
    """One that is a Parameter else."""


class ReleasedFake(Released, FakeTensor):
    """One of a dry run, where parameters are FakeTensors."""


AWAY = {nn.Parameter: ReleasedParameter, FakeTensor: ReleasedFake}
THERE = {away: there for there, away in AWAY.items()}
PLAIN = (*AWAY, *THERE)  # classes of parameters that hold one dense tensor


def release(parameter, served):
    """Let `served()` be called before anyone uses the parameter's elements: it restores it, or raises."""
    if type(parameter) in AWAY:
        parameter._served, parameter.__class__ = served, AWAY[type(parameter)]


def restore(parameter):
    """Make it a Parameter again: its elements are there."""
    if type(parameter) in THERE:
        parameter.__class__ = THERE[type(parameter)]
        del parameter._served


def _asks(func):
    """Tell whether a function asks for no elements: for a shape, a dtype, a gradient, a hook."""
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute not in VALUES
    return name in ASKED or name.startswith(("is_", "_is_")) and name != "is_nonzero"
