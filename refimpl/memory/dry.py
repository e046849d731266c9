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

from .tensors import tensors_in
from .tracker import track


def dry_run(function, *args, **kwargs):
    """Run `function(*args, **kwargs)` on fake tensors and return the Tracker; `.result` is what it returned.

    No memory is taken; what runs on `"cuda"` needs a GPU to be there, but none of its memory. Models, optimizers and
    tensors in the arguments are replaced by fake copies (the originals are not touched), and count as older than the
    step. What `function` builds is fake from the start. Raises ValueError if `function` needs a tensor's values
    (`.item()`, a mask as index), of which there are none, or uses a real tensor that it was not given.
    """
    fake = FakeTensorMode()
    counters = _step_counters(_trackable((args, kwargs)), fake)
    with FakeCopyMode(fake):
        args, kwargs = copy.deepcopy((args, kwargs), counters)
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


def _step_counters(things, fake):
    """Adam reads its step counters: their copies know their values. {id(tensor): fake tensor}, as deepcopy's memo."""
    states = [optimizer.state for optimizer in things if isinstance(optimizer, torch.optim.Optimizer)]
    tensors = [t for t in tensors_in([list(state.values()) for state in states]) if t.ndim == 0 and t.is_cpu]
    values = [tensor.item() for tensor in tensors]
    with fake:
        return {id(t): torch.tensor(value, dtype=t.dtype) for t, value in zip(tensors, values, strict=True)}


def _trackable(tree):
    """The modules, optimizers and tensors in nested lists, tuples and dicts."""
    if isinstance(tree, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ()
    return [found for item in items for found in _trackable(item)]
