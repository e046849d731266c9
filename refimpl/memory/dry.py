"""The dry run: a program on tensors that have shapes and no memory, under the same tracker.

Fake tensors run every operation's shape rules and none of its arithmetic, so the operations, the storages and their
sizes are those of the real run. (An operation that returns a library's workspace, such as oneDNN's LSTM on a CPU, may
say less in its shape rule than it takes; none does in our GPT.)
"""

import copy
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.optim.optimizer import _foreach_supported_types

from .tracker import track


def dry_run(function, *args, **kwargs):
    """Run `function(*args, **kwargs)` on fake tensors and return the Tracker; `.result` is what it returned.

    No memory is taken; what runs on `"cuda"` needs a GPU to be there, but none of its memory. Models, optimizers and
    tensors in the arguments are replaced by fake copies (the originals are not touched), and count as older than the
    step. What `function` builds is fake from the start. Raises ValueError if `function` needs a tensor's values
    (`.item()`, a mask as index), of which there are none, or uses a real tensor that it was not given.
    """
    fake = FakeTensorMode()
    fake.__deepcopy__ = lambda memo: fake  # a copy of a fake tensor, made inside, stays in this mode
    args, kwargs = _fake_copies((args, kwargs), fake)
    try:
        with fake, _as_on_real_tensors(), track(*_trackable((args, kwargs))) as tracker:
            tracker.result = function(*args, **kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(f"dry_run: {error.func} needs the values of a tensor, and fake tensors have none: "
                         "leave .item() and indexing by masks out of the step") from error
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        raise ValueError("dry_run: PyTorch cannot change the dtype or device of a module whose tensors are fake: build "
                         f"it in the right one, GPT(config, dtype=…) or torch.set_default_dtype. {error}") from error
    except AssertionError as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise ValueError("dry_run: the step uses a real tensor that it was not given: build it inside the function, "
                         f"or pass it (or its model) as an argument. {error}") from error
    return tracker


@contextmanager
def _as_on_real_tensors():
    """torch.optim takes its foreach kernels, by default on CUDA, for types that it knows: let it know fake ones."""
    _foreach_supported_types.append(FakeTensor)
    try:
        yield
    finally:
        _foreach_supported_types.remove(FakeTensor)


def _fake_copies(things, fake):
    """Copies of `things`, with the gradients that deepcopy leaves behind. The memo holds them all: it ends here."""
    memo = {}
    with _FakeCopies(fake):
        copies = copy.deepcopy(things, memo)
        for tensor in [each for each in memo.get(id(memo), ()) if isinstance(each, torch.Tensor)]:
            if tensor.is_leaf and tensor.grad is not None:
                memo[id(tensor)].grad = copy.deepcopy(tensor.grad, memo)
    return copies


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
