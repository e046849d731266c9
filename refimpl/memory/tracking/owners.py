"""Whose a tensor is: the paths of parameters and buffers, while these live."""

import weakref


class Owners:
    """Names of tensors; looked up in every step for every parameter, so by id."""

    def __init__(self):
        # id -> (weak reference to a module that has the tensor, its name there, (path of the module, of the tensor)).
        # An id is used again. A weak reference to the tensor itself would forbid torch.utils.swap_tensors.
        self._known = {}

    def learn(self, model, names):
        """Learn the parameters and buffers of `model` that are new; `names`: module -> path. A shared one belongs to
        the first module that has it."""
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and self.of(tensor) is None and module in names:
                        path = names[module]
                        self._known[id(tensor)] = weakref.ref(module), name, (path, f"{path}.{name}")

    def of(self, tensor):
        """Return (path of the module, path of the tensor), or None."""
        reference, name, owner = self._known.get(id(tensor), (None, None, None))
        module = reference and reference()
        if module is None or (module._parameters.get(name) is not tensor and module._buffers.get(name) is not tensor):
            return None
        return owner
