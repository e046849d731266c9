"""Bytes of what is known by name: parameters, buffers, gradients and optimizer states, each storage once.

    rest = peak of a step − these: activations and temporaries
"""

import gc
import time
import weakref

import torch
from torch.nn.parameter import is_lazy

from ..common.ledger import BUFFERS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS, Ledger
from ..common.nested_tensors import dense_parts, tensors_in

KNOWN = PARAMETERS, BUFFERS, GRADIENTS, OPTIMIZER_STATE


class Rarely:
    """Says when to do something that may take a share of the time and no more: `if rarely.due(): with rarely: …`."""

    def __init__(self, share):
        self._share, self._begun, self._spent, self._at = share, time.perf_counter(), 0.0, 0.0

    def due(self):
        """Tell whether what was spent is within the share."""
        return self._spent <= self._share * (time.perf_counter() - self._begun)

    def __enter__(self):
        self._at = time.perf_counter()

    def __exit__(self, *exception):
        self._spent += time.perf_counter() - self._at


class KnownBytes:
    """Knows the process's models and optimizers, weakly: what the program drops must go."""

    def __init__(self):
        self.models, self.optimizers = weakref.WeakSet(), weakref.WeakSet()
        self._modules = []  # all modules of the models, weakly

    def find(self):
        """Look through the process for models, modules with parameters that no other module has, and optimizers."""
        modules = []
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.nn.Module) and "_modules" in vars(thing):
                modules.append(thing)
            elif issubclass(type(thing), torch.optim.Optimizer) and "param_groups" in vars(thing):
                self.optimizers.add(thing)
        children = {id(child) for module in modules for child in module._modules.values() if child is not None}
        self.models = weakref.WeakSet(
            each for each in modules if id(each) not in children and next(each.parameters(), None) is not None)
        self._modules = [weakref.ref(each) for model in self.models for each in model.modules()]

    def has(self, optimizer):
        """Tell whether the first parameter of an optimizer is one of the models'."""
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        return any(p is first for each in self._modules if (module := each()) for p in module._parameters.values())

    def tensors(self):
        """Yield (category, tensor, its parameter's or buffer's module, its name in there; for states the name of the
        state) of all that is known."""
        met = set()
        for reference in self._modules:
            module = reference()
            if module is None:
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in met and not is_lazy(parameter):
                    met.add(id(parameter))
                    yield PARAMETERS, parameter, module, name
                    if parameter.grad is not None:
                        yield GRADIENTS, parameter.grad, module, name
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield BUFFERS, buffer, module, name
        for optimizer in list(self.optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in met:
                        met.add(id(parameter))
                        yield PARAMETERS, parameter, None, ""
                        if parameter.grad is not None:
                            yield GRADIENTS, parameter.grad, None, ""
            for state in list(optimizer.state.values()):
                for name, value in state.items() if isinstance(state, dict) else (("state", state),):
                    for tensor in tensors_in(value):
                        yield OPTIMIZER_STATE, tensor, None, name

    def storages(self, device):
        """Yield (category, storage, tensor, module, name) of each storage on a device, by its index, −1 for the CPU."""
        met = set()
        for category, tensor, module, name in self.tensors():
            for part in dense_parts(tensor):
                if part.get_device() == device and not part.is_meta:
                    storage = part.untyped_storage()
                    if storage._cdata not in met:
                        met.add(storage._cdata)
                        yield category, storage, part, module, name

    def read(self, device):
        """Return a Ledger of the bytes on a device."""
        found = dict.fromkeys(KNOWN, 0)
        for category, storage, *_ in self.storages(device):
            found[category] += storage.nbytes()
        return Ledger(found)
