"""Trials on small tensors, of an optimizer or of a module, of which the program around them sees nothing."""

import contextlib
from collections.abc import Iterator

import torch
from torch.autograd.variable import ImperativeEngine, Variable
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def no_side_effects() -> Iterator[None]:
    """Let nothing outside see what is computed in this context: no tracker, no dry run, no hook of all optimizers,
    modules or saved tensors, no random number. Gradients are off."""
    generator, before = torch.default_generator, torch.default_generator.get_state()
    of_all = [each for place in (optimizers, modules) for name, each in vars(place).items()
              if name.startswith("_global_") and isinstance(each, dict)]
    seen, engine = [(each, dict(each)) for each in of_all], Variable._execution_engine
    try:
        Variable._execution_engine = ImperativeEngine()  # a tracker's tells what backward's formulas took
        for each, _ in seen:
            each.clear()
        with (_disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad(),
              _own_hooks()):
            yield
    finally:
        Variable._execution_engine = engine
        for each, had in seen:
            each.update(had)
        generator.set_state(before)  # a user's seed gives what it gave without the trial


@contextlib.contextmanager
def _own_hooks():
    """Save tensors by hooks that change nothing: those around it do not see them. A tracker sees what enters the class
    `saved_tensors_hooks`. An operation's output, were it kept as it is, would keep itself alive."""
    torch._C._autograd._push_saved_tensors_default_hooks(torch.Tensor.detach, lambda x: x)
    try:
        yield
    finally:
        torch._C._autograd._pop_saved_tensors_default_hooks()
