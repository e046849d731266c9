"""The dry run: a program on tensors that have shapes and no memory, under the same tracker.

Fake tensors run every operation's shape rules and none of its arithmetic, so the operations, the storages and their
sizes are those of the real run. (An operation that returns a library's workspace, such as oneDNN's LSTM on a CPU, may
say less in its shape rule than it takes; none does in our GPT.)
"""

import copy
from contextlib import contextmanager
from types import FunctionType, MethodType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils

from .tracker import track


def dry_run(function, *args, **kwargs):
    """Run `function(*args, **kwargs)` on fake tensors and return the Tracker; `.result` is what it returned.

    No memory is taken; what runs on `"cuda"` needs a GPU to be there, but none of its memory. Models, optimizers and
    tensors in the arguments are replaced by fake copies (the originals are not touched), and count as older than the
    step. What `function` builds is fake from the start. Raises ValueError if `function` needs a tensor's values
    (`.item()`, a mask as index, a sparse tensor), of which there are none, uses a real tensor that it was not given,
    or if an argument cannot be copied.
    """
    fake = FakeTensorMode()
    fake.__deepcopy__ = lambda memo: fake  # a copy of a fake tensor, made inside, stays in this mode
    args, kwargs = _fake_copies((args, kwargs), fake)
    with _explained(), fake, _as_on_real_tensors(), track(*_trackable((args, kwargs))) as tracker:
        tracker.result = function(*args, **kwargs)
    return tracker


# What an error of PyTorch's says when a step cannot be run on fake tensors -> (what it means, what to do).
_VALUES = "the step needs the values of a tensor, and fake tensors have none"
_MEANINGS = {
    "convert all Tensors to FakeTensors": (
        "the step uses a real tensor that it was not given",
        "build it inside the function, or pass it (or its model) as an argument"),
    "Couldn't swap": (
        "PyTorch cannot change the dtype or device of a module whose tensors are fake",
        "build it in the right one, GPT(config, dtype=…) or torch.set_default_dtype"),
    ".numpy() is not supported": (_VALUES, "leave .numpy() out of it"),
    "FakeTensor.__format__": (_VALUES, "leave printing them out of it"),
}


@contextmanager
def _explained():
    """What fake tensors cannot do comes out as a ValueError that says what to do instead."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(f"dry_run: {error.func} needs the values of a tensor, and fake tensors have none: leave "
                         ".item(), `if tensor`, printing and indexing by masks out of the step") from error
    except (RuntimeError, AssertionError, TypeError) as error:
        for words, (meaning, remedy) in _MEANINGS.items():
            if words in str(error):
                raise ValueError(f"dry_run: {meaning}: {remedy}. {error}") from error
        raise


@contextmanager
def _as_on_real_tensors():
    """PyTorch takes its foreach kernels for types that it knows (by default on CUDA in torch.optim, and everywhere to
    clip gradients): let it know fake ones."""
    known = [_foreach_supported_types, getattr(_foreach_utils, "_foreach_supported_types", [])]
    for types in known:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in known:
            types.remove(FakeTensor)


def _fake_copies(things, fake):
    """Copies of `things`, with what deepcopy leaves behind: gradients, and optimizers' own attributes. Its memo holds
    them all, and ends here."""
    memo = {}
    with _FakeCopies(fake):
        try:
            copies = copy.deepcopy(things, memo)
            for original in list(memo.get(id(memo), ())):
                if isinstance(original, torch.Tensor) and original.is_leaf and original.grad is not None:
                    memo[id(original)].grad = copy.deepcopy(original.grad, memo)
                elif isinstance(original, torch.optim.Optimizer):
                    _copy_attributes(original, memo)
        except (TypeError, SystemError, RuntimeError) as error:
            raise ValueError(f"dry_run: an argument cannot be copied: build it inside the function. {error}") from error
    return copies


def _copy_attributes(optimizer, memo):
    """An optimizer's copy has its state and groups; here it gets what a subclass added (a wrapped `step` is not)."""
    twin = memo[id(optimizer)]
    for name in vars(optimizer).keys() - vars(twin).keys():
        if not isinstance(vars(optimizer)[name], (FunctionType, MethodType)):
            setattr(twin, name, copy.deepcopy(vars(optimizer)[name], memo))


class _FakeCopies(FakeCopyMode):
    """deepcopy under it makes fake tensors. Those of numbers on the CPU know their values: optimizers read their step
    counters and learning rates."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo and tensor.ndim == 0 and tensor.is_cpu and not tensor.requires_grad:
                value = tensor.item()
                with self.fake_mode:
                    memo[id(tensor)] = torch.tensor(value, dtype=tensor.dtype)
        return super().__torch_function__(func, types, args, kwargs)


def _trackable(tree):
    """The modules, optimizers and tensors in nested lists, tuples and dicts."""
    if isinstance(tree, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [found for item in items for found in _trackable(item)]
