"""Trials on small tensors, of an optimizer or of a module, of which the program around them sees nothing."""

import contextlib

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def unseen():
    """Let nothing outside see what is computed in this context: no tracker, no dry run, no hook of all optimizers,
    modules or saved tensors, no random number. Gradients are off."""
    generator, before = torch.default_generator, torch.default_generator.get_state()
    of_all = [vars(place)[name] for place in (optimizers, modules) for name in vars(place)
              if name.startswith("_global_") and name.endswith(("hooks", "hooks_always_called"))]
    seen = [(each, dict(each)) for each in of_all if isinstance(each, dict)]
    try:
        for each, _ in seen:
            each.clear()
        with (_disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(),
              saved_tensors_hooks(lambda x: x, lambda x: x)):
            yield
    finally:
        for each, had in seen:
            each.update(had)
        generator.set_state(before)
