"""Trials of an optimizer on small tensors, of which the program that trains with it sees nothing."""

import contextlib

import torch
from torch.optim import optimizer as hooks
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def unseen():
    """Let nothing outside see what an optimizer does in this context: no tracker, no dry run, no hook of all
    optimizers, no random number."""
    generator, before = torch.default_generator, torch.default_generator.get_state()
    seen = [(each, dict(each)) for each in (hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks)]
    try:
        for each, _ in seen:
            each.clear()
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for each, had in seen:
            each.update(had)
        generator.set_state(before)
