"""A step as a recording: which operations ran in which order, and when each tensor that they made lived.

A mode below autograd sees each operation. An operation that makes tensors is noted with the shapes of what it takes and
makes; a weak reference to each new storage tells when it is freed. The result is an AllocationTrace, of which
`plan_static` makes a plan, with the operations beside it, so that `execute` can follow.
"""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...common.allocations import AllocationTrace, Maker

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Made(NamedTuple):
    """A tensor that an operation made: its block in the trace, and its layout there."""

    block: int
    size: tuple
    stride: tuple
    dtype: torch.dtype
    nbytes: int  # of its storage


class Operation(NamedTuple):
    """One operation: what it was called with, and what it made (None for each output that needs no memory)."""

    func: object
    key: tuple | None  # None if it made nothing
    made: tuple


@dataclass
class StepTrace(AllocationTrace):
    """What a step asked for on `device`, in order of its `operations`. `result`: blocks that the step returned."""

    operations: list = field(default_factory=list)
    device: torch.device = torch.device("cpu")
    result: frozenset = frozenset()

    @property
    def alignment(self):
        """Return the alignment that tensors have on this device: PyTorch's own."""
        return 64 if self.device.type == "cpu" else 512


def record_step(step: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Run `step(*args, **kwargs)` and return (what it returned, its StepTrace).

    Tensors on the accelerator are recorded if an argument or parameter that it meets is there, else those on the CPU.
    """
    recorder = StepRecorder()
    with recorder:
        result = step(*args, **kwargs)
    return result, recorder.trace(result)


def key_of(args, kwargs):
    """Return what an operation's outputs depend on, apart from values: layouts, integers, names. Numbers that are
    floats may differ from step to step, as in an optimizer with a schedule."""
    return tuple(_key(each) for each in (*args, *kwargs.items()))


def _key(value):
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(_key(each) for each in value)
    return float if isinstance(value, (float, complex)) else value  # a learning rate changes no layout


def fresh_storages(func, args, kwargs, outputs):
    """List the outputs' storages that are new, None for each that is not. All None if `func` is not to be planned: it
    returns what it was given, tensors of another kind, or tensors that share memory or leave some out."""
    if any(each.alias_info is not None for each in func._schema.returns):
        return [None] * len(outputs)
    found = [None if each is None else _whole_storage(each) for each in outputs]
    keys = [storage._cdata for storage in found if storage is not None]
    given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if type(each) in _PLAIN
             and each.layout is torch.strided}
    unusual = any(each is not None and storage is None for each, storage in zip(outputs, found, strict=True))
    if unusual or len(set(keys)) < len(keys) or given & set(keys):
        return [None] * len(outputs)
    return found


def _whole_storage(tensor):
    """Return the storage of a plain tensor that fills it, else None."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or not tensor.numel():
        return None
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != filled:
            return None
        filled *= size
    storage = tensor.untyped_storage()
    return storage if tensor.storage_offset() == 0 and storage.nbytes() >= tensor.nbytes else None


def listed(outputs):
    """Return what an operation returned as a list."""
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


class StepRecorder(TorchDispatchMode):
    """Records a step; see `record_step`."""

    def __init__(self):
        super().__init__()
        self._maker, self._operations = Maker(), []
        self._block_of, self._ended = {}, deque()  # storage key → (block, weak reference)
        self._devices = {}  # block → device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._settle()
        outputs = func(*args, **kwargs)
        tensors = listed(outputs)
        storages = fresh_storages(func, args, kwargs, tensors)
        made = tuple(None if storage is None else self._note(func, tensor, storage)
                     for tensor, storage in zip(tensors, storages, strict=True))
        key = key_of(args, kwargs) if any(each is not None for each in made) else None
        self._operations.append(Operation(func, key, made))
        return outputs

    def _note(self, func, tensor, storage):
        block = self._maker.alloc(tensor.nbytes, "", func.name().removeprefix("aten::"))
        key, self._devices[block] = storage._cdata, tensor.device
        self._block_of[key] = block, weakref.ref(storage, lambda _, ended=self._ended: ended.append((key, block)))
        return Made(block, tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.nbytes)

    def _settle(self):
        while self._ended:
            key, block = self._ended.popleft()
            self._maker.free(block)
            if self._block_of[key][0] == block:
                del self._block_of[key]

    def trace(self, result):
        """Return the StepTrace. Blocks on other devices than the accelerator, or the CPU, have no bytes there."""
        self._settle()
        devices = sorted({str(each) for each in self._devices.values()}, key=lambda name: (name == "cpu", name))
        device, raw = torch.device(devices[0] if devices else "cpu"), self._maker.trace()
        elsewhere = [block for block, each in self._devices.items() if each != device]
        raw.blocks["nbytes"][elsewhere] = 0  # a plan has one arena, on one device
        returned = {each.untyped_storage()._cdata for each in tree_leaves(result) if type(each) in _PLAIN}
        kept = frozenset(block for key, (block, _) in self._block_of.items() if key in returned)
        operations = [_only_on(device, self._devices, each) for each in self._operations]
        return StepTrace(raw.events, raw.blocks, raw.categories, raw.names, operations, device, kept)


def _only_on(device, devices, operation):
    """Return the operation without what it made on other devices."""
    if any(made is not None and devices[made.block] != device for made in operation.made):
        return Operation(operation.func, None, (None,) * len(operation.made))
    return operation
