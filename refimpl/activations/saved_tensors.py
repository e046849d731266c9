"""What autograd saves, storage by storage: the ground that compression and offload stand on.

`saved_tensors_hooks` shows each tensor that autograd saves and asks what to keep in its place. Bytes belong to
storages, though, and one storage is often saved by several operations, as it is or as a view. So each storage is
handed to the technique once, whole, and every tensor on it becomes a PackedView of what the technique made of it.

Three kinds are never touched, since their owner keeps them and a second copy could only cost: parameters and buffers of
the model with their views, leaves that want a gradient, and the tensors that the model was called with. A cast of a
parameter, as autocast makes one of each weight, has no owner in backward: it is made again from the parameter.
"""

import weakref
from fnmatch import fnmatch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from .storage_report import Report

PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
CAST = "ToCopyBackward0"
ALIASES = {"TBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "TransposeBackward0",
           "PermuteBackward0", "ExpandBackward0", "AliasBackward0", CAST}


class PackedStorage:
    """Hold what a technique made of one storage; `restore()` returns its flat content, a tensor (n,).

    It lives as long as autograd holds a PackedView of it. `views` counts them.
    """

    def __init__(self, tensor):
        storage = tensor.untyped_storage()
        self.original, self.nbytes, self.views = StorageWeakRef(storage), storage.nbytes(), 0
        self.described = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"

    def restore(self):
        """Return the flat content, as it was."""
        raise NotImplementedError(f"{type(self).__name__} defines no restore()")


class PackedView:
    """Stand in the place of one saved tensor: where it lies in a PackedStorage."""

    __slots__ = ("offset", "shape", "stored", "stride")

    def __init__(self, stored, tensor):
        self.stored, self.shape = stored, tensor.shape
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()
        stored.views += 1

    def unpack(self):
        """Return the tensor."""
        with torch.no_grad():
            # one flat content for all tensors that shared the storage
            return self.stored.restore().as_strided(self.shape, self.stride, self.offset)


class Hook:
    """A hook of a module. In a copy of the module, or in a file that it is saved to, it does nothing: the region is
    that of the original, and the weak references to storages in it cannot be copied. Nor is it compiled with it."""

    def __init__(self, function):
        self._function = function

    def __call__(self, *args):
        if not torch.compiler.is_compiling():
            self._function(*args)

    def __reduce__(self):
        return Hook, (_nothing,)


def _nothing(*args):
    """Do nothing. A hook becomes this function in a copy of the module."""


class Whole:
    """A tensor that is kept as it is; RuntimeError if it was changed in place since (PyTorch does not look)."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor):
        # detach(): if an operation saves its own output, node and tensor would otherwise hold each other.
        self.tensor, self.version = tensor.detach(), tensor._version

    def unpack(self):
        """Return the tensor."""
        if self.tensor._version != self.version:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                               f"operation: {self.tensor.dtype} {list(self.tensor.shape)} is at version "
                               f"{self.tensor._version}, expected version {self.version}")
        return self.tensor


class Recast:
    """A cast of a parameter, or a view of one, that is made again; RuntimeError if the parameter was changed since."""

    __slots__ = ("dtype", "layout", "parameter", "version")

    def __init__(self, parameter, tensor):
        self.parameter, self.version, self.dtype = parameter, parameter._version, tensor.dtype
        self.layout = tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(self):
        """Return the tensor."""
        if self.parameter._version != self.version:
            raise RuntimeError("one of the variables needed for gradient computation has been modified by an inplace "
                               f"operation: a parameter {list(self.parameter.shape)}, of which a cast was saved, is at "
                               f"version {self.parameter._version}, expected version {self.version}")
        with torch.no_grad():
            return self.parameter.detach().to(self.dtype).as_strided(*self.layout)


class SavedStorages:
    """Pass what autograd saves through `store` while this context is open.

    Of contexts inside one another only the innermost is asked (PyTorch calls the innermost pair of hooks). Each entry
    begins a new `.report` of what was done.

    - `model`: its parameters and buffers, and what it is called with, are left alone.
    - `smallest`: storages of fewer bytes are left as they are.
    - `only`: patterns of module names (`"blocks.*.mlp"`); what other modules save is left. None: everything.

    Raises TypeError for a model that is no module; ValueError for a threshold below 0 and a pattern that no module has.
    """

    def __init__(self, model, smallest, only):
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: expected the module whose activations are stored")
        if type(smallest) is not int or smallest < 0:
            raise ValueError(f"smallest={smallest!r}: expected a number of bytes, 0 or more")
        self._model, self.smallest = model, smallest
        self._chosen = None if only is None else chosen(model, [only] if isinstance(only, str) else only)
        self._hooks, self._handles, self.report = None, [], Report()

    # --- for the technique ------------------------------------------------------------------------------------------

    def refuse(self, tensor):
        """Say why this tensor's storage is left whole, in a few words; None if it is to be stored."""
        return None

    def store(self, flat, tensor):
        """Return (name of the kind, bytes taken, PackedStorage) for the storage's flat content, or why not: a str."""
        raise NotImplementedError(f"{type(self).__name__} defines no store()")

    # --- the context ------------------------------------------------------------------------------------------------

    def __enter__(self):
        if self._hooks is not None:
            raise RuntimeError(f"this {type(self).__name__} is in use already: make another one for the inner region")
        self.report = Report()
        self._stored = weakref.WeakValueDictionary()  # (storage, version, dtype) -> PackedStorage
        self._left = {}  # storage -> weak reference, which also keeps the address from being reused
        owned = [*self._model.parameters(), *self._model.buffers()]  # at entry: a model may be changed between steps
        self._owned = {tensor.untyped_storage()._cdata for tensor in owned if type(tensor) in PLAIN}
        self._callers, self._inside = {}, []
        try:
            self._listen()
            self._hooks = saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()
        except BaseException:
            self._forget()
            raise
        return self

    def __exit__(self, *exception):
        try:
            self._hooks.__exit__(*exception)
        finally:
            self._forget()

    def _listen(self):
        self._handles.append(self._model.register_forward_pre_hook(Hook(self._called), with_kwargs=True))
        for module in self._chosen or ():
            self._handles.append(module.register_forward_pre_hook(Hook(self._entered)))
            self._handles.append(module.register_forward_hook(Hook(self._left_module), always_call=True))

    def _forget(self):
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks = None
        self._left, self._callers, self._owned = {}, {}, set()

    def _called(self, module, args, kwargs):
        for tensor in pytree.tree_leaves((args, kwargs)):
            if has_storage(tensor) and tensor.is_leaf:
                _remember(self._callers, tensor.untyped_storage())

    def _entered(self, module, args):
        self._inside.append(module)

    def _left_module(self, module, args, output):
        if any(each is module for each in self._inside):  # False if an earlier hook raised before ours
            while self._inside.pop() is not module:
                pass

    # --- one tensor -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _pack(self, tensor):
        if not has_storage(tensor) or tensor.is_quantized or tensor.is_neg() or tensor.is_conj():
            return Whole(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata, tensor._version, tensor.dtype  # written to since, it is another content
        stored = self._stored.get(key)
        if stored is not None:
            return PackedView(stored, tensor)
        nbytes = storage.nbytes()
        if self._is_owned(tensor, storage):
            if storage._cdata not in self._left:
                self.report.owned += nbytes
            owner, steps = self._made_of(tensor.grad_fn)
            if owner is not None and steps.count(CAST) == 1 and steps[-1] == CAST and (
                    nbytes == owner.numel() * tensor.itemsize):
                _remember(self._left, storage)
                return Recast(owner, tensor)
        elif storage._cdata not in self._left:
            kind, after, stored = self._store(tensor, nbytes)
            self.report.add(kind, nbytes, after, stored)
            if stored is not None:
                self._stored[key] = stored
                return PackedView(stored, tensor)
        _remember(self._left, storage)  # kept whole for one tensor, so for all of this storage
        return Whole(tensor)

    def _store(self, tensor, nbytes):
        """Return (kind, bytes, PackedStorage), or (reason, `nbytes`, None) for a storage that is kept whole."""
        if nbytes < self.smallest:
            reason = f"left: smaller than {self.smallest:,} B"
        elif self._chosen is not None and not self._inside:
            reason = "left: of other modules"
        else:
            reason = self.refuse(tensor)
        if reason is None:
            found = self.store(tensor.detach().as_strided((nbytes // tensor.dtype.itemsize,), (1,), 0), tensor)
            if not isinstance(found, str):
                return found
            reason = found
        return reason, nbytes, None

    def _is_owned(self, tensor, storage):
        """Tell whether the storage is kept anyway: by the model, by the caller, or as a leaf."""
        if storage._cdata in self._owned or storage._cdata in self._callers:
            return True
        base = tensor._base if tensor._is_view() else tensor
        return (base.is_leaf and base.requires_grad) or self._made_of(tensor.grad_fn)[0] is not None

    def _made_of(self, node):
        """Return the parameter of which `node` is nothing but views and casts, or None, and these, the last first."""
        steps = []
        while node is not None and type(node).name(node) in ALIASES:  # autocast's cast of a weight, transposed, say
            steps.append(type(node).name(node))
            ((node, _),) = node.next_functions
        leaf = getattr(node, "variable", None)  # AccumulateGrad has it, the node of a leaf
        owned = leaf is not None and type(leaf) in PLAIN and leaf.untyped_storage()._cdata in self._owned
        return leaf if owned else None, steps


def has_storage(tensor):
    """Tell whether the tensor is a plain one: a strided view of one storage."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def _unpack(packed):
    return packed.unpack()


def _remember(storages, storage):
    """Add a storage to a dict of weak references. Expired ones are removed from time to time, for long regions."""
    if storages and len(storages) % 1024 == 0:
        for key in [key for key, reference in storages.items() if reference.expired()]:
            del storages[key]
    storages[storage._cdata] = StorageWeakRef(storage)


def chosen(model, patterns):
    """Find the modules of `model` whose names match one of `patterns`; ValueError for a pattern that matches none."""
    modules = dict(model.named_modules(remove_duplicate=False))  # a shared module has several names
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in modules):
            raise ValueError(f"only={pattern!r}: no module of this {type(model).__name__} has such a name; there are "
                             f"{', '.join(map(repr, list(modules)[1:6]))} …")
    return list(dict.fromkeys(module for name, module in modules.items() if any(fnmatch(name, p) for p in patterns)))
