"""A model that never exists whole: it is built on the meta device, without bytes, and gets its values unit by unit.

    with torch.device("meta"):
        model = GPT(config)
    engine = Zero3(model, comm, initialize=model.initialize)

A unit is made whole, initialized, and cut; its shard stays. With shards of S₁, S₂ … bytes and whole units of U₁, U₂ …,
the start takes at its peak max_i (S₁ + … + Sᵢ + Uᵢ): all shards and one unit. `closed_forms.start_bytes` counts it.
Before the first unit is made, the engine tries its optimizer on small tensors (`internals/elementwise.py`). The trial
takes about 4 MB for a moment, however large the model is, and frees them.
"""

import difflib
import json
import os
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ...common.marks import mark
from ...common.materializing import lacks_values, no_value, replaced


def initializer_of(model, device, initialize=None):
    """Return the Initializer of a model on the meta device: of its modules, or from a file. None for another model.

    ValueError for an `initialize` that nothing needs.
    """
    made = replace_meta_tensors(model, device)
    if not made and initialize is not None:
        raise ValueError(f"initialize={initialize!r}, and no parameter or buffer of the model is on the meta device: "
                         'build it in `with torch.device("meta"):`')
    if not made:
        return None
    kind = FileInitializer if isinstance(initialize, (str, os.PathLike)) else ModuleInitializer
    return kind(model, made, initialize)


def replace_meta_tensors(model, device):
    """Put parameters and buffers that are on the meta device on `device`. Parameters become new ones, of one element
    that is expanded to their shape. Buffers get bytes, without values.

    Return {module: its new parameters and buffers, by name}, the children before their parents.
    """
    placeholders = {}
    return replaced([model], lambda tensor: _made(tensor, device, placeholders))


def _made(tensor, device, placeholders):
    if not isinstance(tensor, nn.Parameter):
        return mark(torch.full_like(tensor, no_value(tensor.dtype), device=device), "buffers")
    if tensor.dtype not in placeholders:
        placeholder = torch.full((), no_value(tensor.dtype), dtype=tensor.dtype, device=device)
        placeholders[tensor.dtype] = mark(placeholder, "parameters")
    parameter = nn.Parameter(placeholders[tensor.dtype].expand(tensor.shape), tensor.requires_grad)
    if not isinstance(tensor, FakeTensor):  # which has its device there
        parameter.__dict__.update(tensor.__dict__)  # such as the spec of a part, see `sharding.set_spec`
    return parameter


class Initializer:
    """Gives values to what was on the meta device: `made` is what `replace_meta_tensors` returned."""

    def __init__(self, model, made):
        self._model, self._made = model, dict(made)
        self._new = {x for tensors in made.values() for x in tensors.values()}

    def reads_shards_of(self, bucket):
        """Tell whether `read` gives a rank its shard of a bucket, which is then never whole."""
        return False

    def read_whole(self, bucket):
        """Read those parameters of a bucket, which is whole, that a file has. No-op: a function writes them."""

    def make_whole(self, parameters):
        """Give bytes to parameters that are in no bucket, and stay whole."""
        self._whole = [p for p in parameters if p in self._new]
        for parameter in self._whole:
            parameter.data = mark(parameter.data.clone(memory_format=torch.contiguous_format), "parameters")


class ModuleInitializer(Initializer):
    """Initializes each module by its `reset_parameters()`, if it has one, and then by `function(module)`.

    ValueError for one that has no values afterwards.
    """

    def __init__(self, model, made, function=None):
        super().__init__(model, made)
        self._names, self._function = {m: name for name, m in model.named_modules()}, function
        self._done = set()

    @torch.no_grad()
    def fill(self, modules):
        """Initialize these modules, all of whose parameters are whole now."""
        for module in [module for module in self._made if module in modules]:
            new = self._made.pop(module)
            fresh = any(x not in self._done for x in new.values())  # not the second of two that share a weight
            if fresh and hasattr(module, "reset_parameters"):
                # reset_parameters writes all of the module's, also those that had values
                kept = [(p, p.clone()) for p in module.parameters(recurse=False) if p not in self._new]
                module.reset_parameters()
                for parameter, value in kept:
                    parameter.copy_(value)
            if self._function is not None:
                self._call(module)
            self._done.update(new.values())
            for name, tensor in new.items():
                self._check(module, name, tensor)

    def _call(self, module):
        """Call the function. ValueError if it reads or writes what is in shards by then."""
        try:
            self._function(module)
        except RuntimeError as error:
            if " is in shards" not in str(error) and "single memory location" not in str(error):  # or not yet whole
                raise
            raise ValueError(f"{_called(self._function)} writes for {self._names[module] or 'the model'}, "
                             f"{type(module).__name__}, to parameters of modules in other units, which are in shards "
                             "by then: let it write to a module's own, or pass a safetensors file") from error

    def _check(self, module, name, tensor):
        if lacks_values(tensor):
            by = "" if self._function is None else f" and {_called(self._function)}"
            raise ValueError(f"{self._path(module, name)} has no values after reset_parameters(){by} of its "
                             f"{type(module).__name__}: pass as initialize= a function that writes them, or a "
                             "safetensors file")

    def _path(self, module, name):
        return f"{self._names[module]}.{name}".lstrip(".")

    def finish(self):
        """Initialize what is in no unit, such as modules that have buffers alone."""
        self.fill(list(self._made))


def _called(function):
    return f"{getattr(function, '__name__', function)}()"


class FileInitializer(Initializer):
    """Reads values from a safetensors file, or from several whose index (model.safetensors.index.json) is given. A rank
    reads the rows that its shards are in.

    ValueError for a tensor that no file has, or that has another shape there.
    """

    def __init__(self, model, made, path):
        super().__init__(model, made)
        self._path = Path(path)
        self._aliases = {}  # parameter → all of its names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in self._new:
                self._aliases.setdefault(parameter, []).append(name)
        if self._path.suffix == ".json":
            index = json.loads(self._path.read_text())["weight_map"]
            self._files = {name: self._path.parent / file for name, file in index.items()}
        else:
            with safe_open(self._path, framework="pt") as stored:
                self._files = dict.fromkeys(stored.keys(), self._path)
        self._check_shapes()

    def fill(self, modules):
        """No-op: all is read already."""

    def reads_shards_of(self, bucket):
        """Tell whether the file has all of a bucket."""
        return self._new.issuperset(bucket.parameters)

    @torch.no_grad()
    def read_whole(self, bucket):
        """Read those parameters of a bucket that were on the meta device, among others."""
        for parameter in self._new.intersection(bucket.parameters):
            self._read(parameter, 0, parameter.numel(), parameter.data.view(-1))

    def read(self, pieces, shard):
        """Read the elements of all pieces of a shard."""
        for slot, first, end, place in pieces:
            self._read(slot.parameter, first, end, shard[place : place + end - first])

    def _read(self, parameter, first, end, out):
        name = self._found(self._aliases[parameter])
        with safe_open(self._files[name], framework="pt") as stored:
            if not parameter.dim():  # a scalar has no rows to slice
                out.copy_(stored.get_tensor(name).reshape(-1))
                return
            row = max(1, parameter[0].numel())
            begin = first // row
            rows = stored.get_slice(name)[begin : -(-end // row)]  # a file gives rows, and a shard begins anywhere
            out.copy_(rows.reshape(-1)[first - begin * row : end - begin * row])

    def _check_shapes(self):
        for parameter, names in self._aliases.items():
            name = self._found(names)
            with safe_open(self._files[name], framework="pt") as stored:
                shape = tuple(stored.get_slice(name).get_shape())
            if shape != tuple(parameter.shape):
                raise ValueError(f"{name} has shape {shape} in {self._files[name]}: expected {tuple(parameter.shape)}")

    @torch.no_grad()
    def finish(self):
        """Read all buffers that are saved, and parameters that are in no unit. ValueError for a buffer without values
        that is not saved."""
        saved = self._model.state_dict(keep_vars=True).keys()
        for parameter in self._whole:
            self._read(parameter, 0, parameter.numel(), parameter.view(-1))
        for name, buffer in self._model.named_buffers():
            if name in saved and (name in self._files or buffer in self._new):
                with safe_open(self._files[self._found([name])], framework="pt") as stored:
                    buffer.copy_(stored.get_tensor(name))
            elif buffer in self._new:
                raise ValueError(f"{name} is a buffer on the meta device that no file has: build the model's buffers "
                                 "with their values, as accelerate.init_empty_weights() does")

    def _found(self, names):
        for name in names:
            if name in self._files:
                return name
        near = difflib.get_close_matches(names[0], self._files, 1, 0)
        raise ValueError(f"{names[0]} is not in {self._path}, which has {len(self._files)} tensors, such as "
                         f"{near[0] if near else 'none'}")
