"""Parameters whose elements are in shards for now: to read one gathers it, or raises an error with its name.

A parameter's tensor stays the same object while its elements come and go. While they are away its class is `Released`,
whose `__torch_function__` sees each use of it from Python, by whatever name or list it was found: a head that is tied
by `F.linear(x, self.embedding.weight)`, a penalty over `self.parameters()`, a `functional_call`. A
shape, a dtype or a hook needs no elements; for all else `served` gathers it. Other tensors are not slowed down.

There are reads for which torch calls no `__torch_function__`: `torch.tensor(p)`, transforms of torch.func of a
parameter itself (`vmap(f)(p)`), and those of a backward. In an engine's first step `Unread`, a dispatch mode, refuses
them. DLPack, and a later step that goes another way, read NaN.
"""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
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
SEEN = (torch.Tensor, nn.Parameter, ReleasedParameter)
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


class Unread(TorchDispatchMode):
    """Refuses each operation that reads the elements of what stands for parameters that are away, with RuntimeError.

    - `placeholders()`: the tensors that stand for them; `names(shape)`: names of parameters that may be meant.
    """

    only_watches = True  # see memory.tracking.in_place

    def __init__(self, placeholders, names):
        super().__init__()
        self._placeholders, self._names = placeholders, names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        away = {_storage(x) for x in self._placeholders()}
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if type(x) in SEEN and x.layout is torch.strided]
        read = [x for x in tensors if _storage(x) in away]
        if read and func is not aten.expand.default:  # by which `Gathering.hide` makes them
            raise RuntimeError(f"{func} reads a parameter in shards, which no gather serves there: one of shape "
                               f"{tuple(read[0].shape)}, such as {self._names(read[0].shape)}. torch.tensor(p) and "
                               "vmap(f)(p) or grad(f)(p) of torch.func do so: give them p.clone()")
        return func(*args, **kwargs or {})


def _storage(x):
    return x.untyped_storage()._cdata
