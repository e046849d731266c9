"""Values for a model on the meta device, this rank's part alone; the same values whatever the mesh.

    with torch.device("meta"):
        model = GPT(config)                        # shapes, no bytes
    engine = together(model, mesh, seed=0)         # a rank makes what it holds

A unit is a layer, or a module before or after the layers. A rank makes a unit whole on the host, from random numbers of
(seed, the unit's name), copies its own blocks of it, and lets it go: at most one unit is whole at a time. From a
safetensors file it reads its blocks alone.
"""

import copy
import hashlib

import torch
from safetensors import safe_open

from ..common.materializing import build
from ..common.nested_tensors import is_dry
from ..model import GPT
from ..sharding import spec_of


def on_meta(model):
    """Tell whether a model has no bytes yet. ValueError if some of its parameters have."""
    found = {p.device.type == "meta" for p in model.parameters()}
    if len(found) > 1:
        raise ValueError(f"{type(model).__name__} has parameters on the meta device and others elsewhere: build all of "
                         'it in `with torch.device("meta"):`, or none')
    return found == {True}


class RandomValues:
    """Gives modules of a split model the values of the whole one. `whole`: on the meta device, before it was split."""

    def __init__(self, whole, seed):
        self.whole, self.seed, self.unit, self.made = whole, seed, None, {}
        self.initialize = whole.initialize if isinstance(whole, GPT) else getattr(whole, "_init_weights", None)
        first = {}
        self.first = {name: first.setdefault(x, name) for x, name in (  # of a tied tensor, which has several names
            (x, name) for name, x in (*whole.named_parameters(remove_duplicate=False),
                                      *whole.named_buffers(remove_duplicate=False)))}
        self.layers = {f"{name}.{i}" for name, module in whole.named_modules()
                       if isinstance(module, torch.nn.ModuleList) for i in range(len(module))}

    def __call__(self, name, parameter):
        """Write the values of one parameter or buffer."""
        spec = spec_of(name, parameter)
        whole = self.first[spec.name]
        unit = self._unit_of(whole)
        if unit != self.unit:
            self.unit, self.made = unit, self._make(unit)
        parameter.copy_(spec.block(self.made[whole]))

    def names(self, name):
        """Return all names that the whole model has for a tensor of this name."""
        return [each for each, first in self.first.items() if first == self.first[name]]

    def _unit_of(self, name):
        parts = name.split(".")[:-1]
        prefixes = [".".join(parts[:i + 1]) for i in range(len(parts))]
        return next((each for each in prefixes if each in self.layers), prefixes[-1])

    def _make(self, unit):
        module = copy.deepcopy(self.whole.get_submodule(unit))
        with torch.random.fork_rng(devices=[]):  # the program's own random numbers go on as before
            # 7 bytes: a seed is below 2⁶³
            torch.manual_seed(int.from_bytes(hashlib.sha256(f"{self.seed} {unit}".encode()).digest()[:7], "big"))
            build([module], "cpu", self.initialize)
        return {f"{unit}.{name}": x.detach() for name, x in (*module.named_parameters(remove_duplicate=False),
                                                             *module.named_buffers(remove_duplicate=False))}


class FileValues:
    """Gives modules of a split model the values in a safetensors file of the whole one."""

    def __init__(self, path, otherwise):
        self.path, self.otherwise = path, otherwise  # of buffers, which files need not have

    def __call__(self, name, parameter):
        """Write the values of one parameter or buffer. KeyError if the file has none of a parameter's names."""
        spec = spec_of(name, parameter)
        with safe_open(self.path, "pt") as file:
            known = set(file.keys())
            stored = next((each for each in self.otherwise.names(spec.name) if each in known), None)
            if stored is None and not isinstance(parameter, torch.nn.Parameter):
                return self.otherwise(name, parameter)
            if stored is None:
                raise KeyError(f"{self.path} has no {spec.name}: expected a file of the whole model")
            stored = file.get_slice(stored)
            parameter.copy_(spec.block(stored[:]) if spec.fused else stored[
                tuple(slice(o, o + n) for o, n in zip(spec.offsets, spec.lengths, strict=True))])


def give_values(module, device, values):
    """Give a split module on the meta device bytes on `device`, and its `values`: a function of a name and a tensor."""
    names = {}
    for prefix, each in module.named_modules():
        for name in (*each._parameters, *each._buffers):
            names.setdefault(each, []).append((name, f"{prefix}.{name}".lstrip(".")))

    def fill(each):
        for name, path in names.get(each, ()):
            tensor = getattr(each, name)
            if tensor is not None:
                values(path, tensor)

    build([module], device, _zeros if any(map(is_dry, module.parameters())) else fill)


def _zeros(module):
    """Stand for values in a dry run."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.zero_()
