"""The life of storages: allocated, resized and freed, by which operation; not yet what they are for.

Each operation is seen below autograd (a `TorchDispatchMode`). A storage that it allocates is noted once, and a weak
reference tells when it is freed. Views and tied weights share a storage and count once. What a kernel takes
and returns inside one operation is not seen; see `memory.measure` for that.
"""

import functools
import threading
import time
import weakref
from typing import NamedTuple

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ...common.marks import mark_of
from ...common.nested_tensors import PLAIN, dense_parts, tensors_in
from ..storage_records import START, Op, StorageRecord
from ..trace import Trace
from .in_place import TAKES_MORE, inside_formula, sum_of
from .lines import Lines
from .taking import WORKSPACE, gpu_of, inside_on_cuda, may_take, note_of, takes_workspace

_STRIDED = torch.strided
# Questions that fake tensors ask of the dispatcher, and the optimizer's notes to the profiler.
_NO_TENSORS = frozenset({
    torch.ops.prim.device.default,
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
})


class _Facts(NamedTuple):
    """What is known of an operation beforehand; looked up by id, since its hash is a call of Python's."""

    name: str
    no_tensors: bool
    adds: bool  # autograd may mean to do it in place
    takes_workspace: bool
    inside: object  # what CUDA takes in it, as a function of its arguments, or None


_facts = {}  # id of an operation -> its _Facts; operations live as long as the process


def _facts_of(func):
    name = func.name().removeprefix("aten::").partition(".")[0]
    _facts[id(func)] = facts = _Facts(name, func in _NO_TENSORS, func is torch.ops.aten.add.Tensor, may_take(func),
                                       inside_on_cuda(func))
    return facts


@functools.cache
def dtype_named(dtype):
    """Return a type's name, `float32`."""
    return str(dtype).removeprefix("torch.")


class _StorageRef(weakref.ref):
    __slots__ = ("key",)


class StorageMode(Trace, TorchDispatchMode):
    """Write a Trace. Subclasses say in which phase and module an operation runs."""

    only_watches = True  # see in_place.py
    kernels_of = None  # "cuda" in a dry run for a GPU, whose tensors are on "cpu" by name
    supports_higher_order_operators = True  # torch.cond, flex_attention: seen as one operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled code run as such."""
        return True

    def __init__(self) -> None:
        Trace.__init__(self)
        TorchDispatchMode.__init__(self)
        self._alive = {}  # storage key -> (record index, weak reference)
        self._with_workspaces = set()  # names of operations
        self._packing = 0  # deeper than 0: what is born is a technique's own copy
        self._under_fake_mode = True
        self._lock = threading.RLock()  # autograd has threads of its own on CUDA
        self._program = Lines()  # where it runs
        self.on_operation = None  # called with each operation, its arguments and what it returned

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if self._with_workspaces:
            self.notes.append(note_of(self._with_workspaces, self.kernels_of or self.device))

    def _where(self):
        """Return (phase, module) of the operation that just ran."""
        return "forward", ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        facts = _facts.get(id(func)) or _facts_of(func)
        if facts.no_tensors:  # most of a dry run's calls ask for a device
            return args[0].device if func is torch.ops.prim.device.default else func(*args, **kwargs)
        if self._under_fake_mode and inside_formula():
            return func(*args, **kwargs)
        if func is not torch.ops.aten.lift_fresh.default:  # torch.tensor(…) fills a storage first, then announces it
            self._see(args)
            if kwargs:
                self._see(kwargs.values())
        if facts.adds:
            func = sum_of(args)
        outputs = func(*args, **kwargs)
        if facts.takes_workspace and takes_workspace(func, args, outputs):
            self._with_workspaces.add(facts.name)
        if func is not torch.ops.aten.detach.default:  # an alias, made by autograd and by our own hook
            self._record(facts.name, outputs)
        if facts.inside is not None and (gpu := gpu_of(args[0])) is not None:
            self._took_inside(facts.inside(gpu, *args), str(args[0].device))
        if self.on_operation is not None:
            self.on_operation(func, args, kwargs, outputs)
        return outputs

    def _record(self, name, outputs):
        """Note the operation `name`, and the storages that it made or resized."""
        with self._lock:
            phase, module = self._where()
            op = Op(name, phase, module, time.time_ns())
            self.ops.append(op)
            self._line = None
            self._see((outputs,), op)
            if self._line is None and self._program.made_a_node():
                self._program.now()

    def _took_inside(self, sizes, device):
        """Note that the last operation took tensors of so many bytes for itself, and gave them back."""
        with self._lock:
            at, first = len(self.ops) - 1, len(self.records)
            for nbytes in sizes:
                record = self._recorded(device, nbytes, self.ops[-1])
                record.alive, record.mark = False, WORKSPACE
                self.records.append(record)
            taken = list(enumerate(sizes, first))
            self.events += [(at, i, nbytes) for i, nbytes in taken]
            self.events += [(at + 1, i, -nbytes) for i, nbytes in reversed(taken)]

    def _see(self, items, op=None):
        """Register each storage in `items` that is new: born by `op`, or older than the context if there is none."""
        alive = self._alive
        for item in items:  # on every operation's way
            if isinstance(item, torch.Tensor):
                for tensor in (item,) if type(item) in PLAIN and item.layout is _STRIDED else dense_parts(item):
                    storage = tensor.untyped_storage()
                    entry = alive.get(storage._cdata)
                    if entry is None:
                        if not tensor._is_zerotensor():  # a forward derivative's: it has no memory
                            self._register(storage, tensor, op)
                    elif op is not None and storage.nbytes() != self.records[entry[0]].nbytes:
                        self._update_size(entry[0], storage.nbytes())
            elif isinstance(item, (tuple, list)):
                self._see(item, op)
            elif isinstance(item, dict):
                self._see(item.values(), op)

    def _register(self, storage, tensor=None, op=None, nbytes=None):
        """Add a record of a storage. Returns it, or None for a meta tensor, which holds nothing."""
        device = storage.device if tensor is None else tensor.device
        if device.type == "meta" or (storage.device.type == "meta" and not self._under_fake_mode):
            return None  # a fake tensor's storage is on meta: a dry run inside takes nothing either
        if device.type == "cuda" and not torch.cuda.is_available():  # fake, and autograd would end the process
            raise ValueError(f"tensors on {device} need a GPU, in a dry run too (none of its memory): use the CPU")
        with self._lock:
            index, nbytes = len(self.records), storage.nbytes() if nbytes is None else nbytes
            record = self._recorded(str(device), nbytes, op)
            record.mark, record.packed = mark_of(storage), self._packing > 0
            if tensor is not None:
                record.shape, record.dtype = tuple(tensor.shape), dtype_named(tensor.dtype)
            reference = _StorageRef(storage, self._freed)
            reference.key = storage._cdata
            self.records.append(record)
            self.events.append((record.born, index, nbytes))
            self._alive[reference.key] = index, reference
            return record

    def _recorded(self, device, nbytes, op):
        """Return a record of a storage that `op`, the last operation, made; without `op` of one that is older."""
        if op is None:
            return StorageRecord(device, START, "forward", "", -1, nbytes)
        if self._line is None:
            self._line = self._program.now()
        line, source = self._line
        return StorageRecord(device, op.name, op.phase, op.module, len(self.ops) - 1, nbytes, line=line, source=source)

    def _freed(self, reference):
        index, _ = self._alive.pop(reference.key, (None, None))
        if index is not None:
            record = self.records[index]
            record.alive = False
            record.freed_by_backward = record.kept and torch._C._current_graph_task_id() != -1
            self.events.append((len(self.ops), index, -record.nbytes))  # before the next operation

    def _update_size(self, index, nbytes):
        record = self.records[index]
        if nbytes != record.nbytes:
            self.events.append((len(self.ops) - 1, index, nbytes - record.nbytes))
            record.nbytes = nbytes

    def _of(self, tensor):
        """Return the records of a tensor's storages; one not met before is older than the context."""
        if type(tensor) in PLAIN and tensor.layout is _STRIDED and not is_functorch_wrapped_tensor(tensor):
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                return (self.records[entry[0]],)  # nearly always
        found = []
        while is_functorch_wrapped_tensor(tensor):  # an argument of vmap or grad: what it wraps has the storage
            tensor = get_unwrapped(tensor)
        for dense in () if is_lazy(tensor) or tensor._is_zerotensor() else dense_parts(tensor):
            storage = dense.untyped_storage()
            entry = self._alive.get(storage._cdata)
            record = self.records[entry[0]] if entry else self._register(storage, dense)
            if record is not None:
                found.append(record)
        return found

    def meet(self, tensor: torch.Tensor) -> None:
        """Note a tensor that may be older than the context."""
        self._of(tensor)

    def numbers_of(self, things: object) -> set[int]:
        """Return the numbers of the records of all tensors in a thing that are known."""
        found = (self._alive.get(tensor.untyped_storage()._cdata) for tensor in tensors_in(things)
                 if tensor.layout is _STRIDED and not is_functorch_wrapped_tensor(tensor))
        return {entry[0] for entry in found if entry is not None}

    def alive(self) -> dict[int, int]:
        """Return {the storage's `_cdata`: the number of its record} of all that are alive now."""
        return {key: number for key, (number, _) in list(self._alive.items())}

    def tensor_made(self, name: str, tensor: torch.Tensor) -> None:
        """Note a tensor that a call made without an operation."""
        self._record(name, tensor)

    def ran(self, name: str, outputs: object) -> None:
        """Note that a formula of autograd's ran as one operation."""
        self._record(name, outputs)
        if name in TAKES_MORE:
            self._with_workspaces.add(name)

    def resized(self, storage: torch.UntypedStorage, before: int) -> None:
        """Note that `untyped_storage().resize_` was called on a storage that had `before` bytes."""
        if storage._cdata not in self._alive:
            self._register(storage, nbytes=before)
        if storage._cdata in self._alive:
            self._record("resize_", ())
            self._update_size(self._alive[storage._cdata][0], storage.nbytes())
