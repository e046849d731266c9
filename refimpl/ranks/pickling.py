"""Functions, arguments and results as bytes for another process; the name of the variable that cannot be pickled.

cloudpickle pickles by value what no other process could import: what a notebook's cell or a script defines, closures,
lambdas. Everything else is pickled by its name, and ranks import it.
"""

import functools
import importlib
import io
import linecache
import os
import pickle
import sys
import threading
import types

import cloudpickle
import torch
from torch._subclasses.fake_tensor import FakeTensor


def pack(fn, args):
    """Pickle (fn, args) for the ranks; return the bytes and {file name: lines} of functions whose code is in no file.

    TypeError naming the variable or argument that cannot be pickled: a lock, an open file, a generator, a tensor on a
    GPU, …
    """
    buffer = io.BytesIO()
    packer = _ToRanks(buffer)
    try:
        packer.dump((fn, args))
    except Exception as error:
        named = {f"the function {_name(fn)}": fn, **{f"argument {i}": arg for i, arg in enumerate(args, 1)}}
        raise TypeError(_explain(named, _ToRanks)) from error
    return buffer.getbuffer(), packer.sources


def pack_result(value):
    """Pickle what a rank returns, tensors on a GPU as copies on the host. TypeError if it cannot be pickled."""
    buffer = io.BytesIO()
    try:
        _ToCaller(buffer).dump(value)
    except Exception as error:
        raise TypeError(_explain({"the result": value}, _ToCaller)) from error
    return buffer.getvalue()


HOST = ("cpu", "meta")  # device types of tensors that any process can hold
OPEN_FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
# Dtypes of tensors that can be pickled and unpickled. Others cannot (uint16, float8_e4m3fn, …).
PICKLED = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16,
           torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128)


class _Packer(cloudpickle.Pickler):
    def reducer_override(self, obj):
        if isinstance(obj, OPEN_FILES) and obj not in (sys.stdout, sys.stderr):
            raise TypeError("an open file belongs to its process: pass its path")  # cloudpickle would copy its contents
        if type(obj) is torch.Tensor and obj.layout is torch.strided and obj.device.type == "cpu":
            return _reduced(obj) if not obj.is_quantized and not vars(obj) else super().reducer_override(obj)
        return super().reducer_override(obj)


def _reduced(tensor):
    """Reduce a tensor, for pickle, to its own elements.

    torch would pickle the whole storage of a view: 1 GiB, for example, for one row of a large matrix.
    """
    plain = tensor.detach()
    if plain.untyped_storage().nbytes() > plain.nbytes:
        plain = plain.clone()
    if tensor.dtype in PICKLED:
        return plain.requires_grad_(tensor.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    raw = plain.contiguous().as_strided((plain.numel(),), (1,)).view(torch.uint8)
    return _from_bytes, (raw, tensor.dtype, tensor.shape, tensor.requires_grad)


def _from_bytes(raw, dtype, shape, requires_grad):
    return raw.view(dtype).view(shape).requires_grad_(requires_grad)


_registering = threading.Lock()  # threads may launch at once, and cloudpickle has one register for all


class _ToRanks(_Packer):
    """Pickles for ranks: by value what they cannot import. Keeps the source of code that is not in a file."""

    def __init__(self, file):
        super().__init__(file)
        self.sources, self._importable = {}, {}

    def reducer_override(self, obj):
        if isinstance(obj, torch.Tensor):
            if isinstance(obj, FakeTensor):
                raise TypeError("a fake tensor has no values")
            if obj.device.type not in HOST:
                raise TypeError(f"a tensor on {obj.device} belongs to its process: pass its .cpu()")
        if isinstance(obj, types.ModuleType) and type(obj) is not types.ModuleType:
            if sys.modules.get(obj.__name__) is obj:  # a module's subclass, such as torch._dynamo.config
                return importlib.import_module, (obj.__name__,)
        if not isinstance(obj, (type, types.FunctionType)):
            return super().reducer_override(obj)
        self._keep_source(obj)
        module = sys.modules.get(obj.__module__ or "")
        if module is None or self._can_be_imported(module):
            return super().reducer_override(obj)
        with _registering:
            cloudpickle.register_pickle_by_value(module)
            try:
                return super().reducer_override(obj)
            finally:
                cloudpickle.unregister_pickle_by_value(module)

    def _can_be_imported(self, module):
        name = module.__name__
        if name not in self._importable:
            self._importable[name] = name == "__main__" or _importable(module)
        return self._importable[name]

    def _keep_source(self, obj):
        """Keep the source of a notebook's cell, so that a rank's traceback can show it."""
        if isinstance(obj, types.FunctionType):
            name = obj.__code__.co_filename
            if name not in self.sources and not os.path.exists(name):
                lines = linecache.getlines(name)
                if lines:
                    self.sources[name] = lines


class _ToCaller(_Packer):
    """Pickles for the caller: CUDA tensors as copies on the host, since the caller may have no GPU, or another one."""

    def reducer_override(self, obj):
        if isinstance(obj, torch.Tensor) and obj.device.type not in HOST:
            host = obj.detach().cpu().requires_grad_(obj.requires_grad)
            if isinstance(obj, torch.nn.Parameter):
                return torch.nn.Parameter(host, obj.requires_grad).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return _reduced(host)
        return super().reducer_override(obj)


def _importable(module):
    """Tell whether a new process with the same sys.path would import the same file under the same name.

    Exceptions are test modules, whose asserts pytest rewrites, and modules made by hand.
    """
    file = getattr(module, "__file__", None)
    if file is None or not file.endswith(".py"):
        return True  # built-in or compiled: left to cloudpickle
    loader = type(getattr(module, "__loader__", None))
    if loader.__module__.startswith("_pytest."):
        return False
    path, found, name = None, None, ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}" if name else part
        specs = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        found = next((spec for spec in specs if spec is not None), None)
        if found is None:
            return False
        path = found.submodule_search_locations
    return found.origin is not None and os.path.realpath(found.origin) == os.path.realpath(file)


# --- what cannot be pickled --------------------------------------------------------------------------------------


def _explain(named, packer):
    """Say which of `named` cannot be pickled; of a function or a partial, which of its variables, recursively."""
    for name, obj in named.items():
        error, seen = _error(obj, packer), set()
        if error is None:
            continue
        while isinstance(obj, (types.FunctionType, functools.partial)) and id(obj) not in seen:
            seen.add(id(obj))
            wrong = [(label, part) for label, part in _variables(obj) if id(part) not in seen and _error(part, packer)]
            if wrong:
                label, obj = wrong[0]
                name, error = f"{name} → {label}", _error(obj, packer)
        return f"{name} cannot be pickled: {type(obj).__name__}: {error}"
    return f"{', '.join(named)} cannot be pickled together, though each of them can"


def _error(obj, packer):
    try:
        packer(io.BytesIO()).dump(obj)
    except Exception as error:
        return error
    return None


def _variables(fn):
    """Yield (label, value) of everything pickled with a function: its closure, globals and defaults; with a partial:
    its function and arguments."""
    if isinstance(fn, functools.partial):
        yield from (("its function", fn.func), *((f"its argument {i}", arg) for i, arg in enumerate(fn.args, 1)),
                    *((f"its argument {name!r}", arg) for name, arg in fn.keywords.items()))
        return
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        if cell != types.CellType():  # not empty; an empty one is a variable without a value yet
            yield f"closure variable {name!r}", cell.cell_contents
    for name in _names(fn.__code__):
        if name in fn.__globals__:
            yield f"global variable {name!r}", fn.__globals__[name]
    for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        yield "a default", value


def _names(code):
    """Return the names that a function, and functions inside it, look up. Its globals are among them."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return list(dict.fromkeys([*code.co_names, *(name for one in inner for name in _names(one))]))


def _name(fn):
    return getattr(fn, "__qualname__", type(fn).__name__).replace("<locals>.", "")
