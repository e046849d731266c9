"""Refusal of what a backward written by hand does not have: derivatives of it, and transforms of torch.func."""

import torch
from torch.autograd.forward_ad import unpack_dual

TRANSFORMS = {"Grad": "grad, vjp, jacrev or hessian", "Jvp": "jvp, jacfwd or hessian", "Vmap": "vmap"}


def refuse_transforms(name, instead, tensors=(), refused=tuple(TRANSFORMS)):
    """Raise RuntimeError if the call of `name` is inside of a `refused` transform of torch.func, or as
    `refuse_tangents`. `instead`: what to use.

    PyTorch would refuse it later, in words about autograd.Function. In a graph of torch.compile nothing is refused.
    """
    if torch.compiler.is_compiling():  # dynamo cannot trace the questions below
        return
    active = {each.key().name for each in torch._C._functorch.get_interpreter_stack() or ()}
    for kind in refused:
        if kind in active:
            raise RuntimeError(f"{name} under torch.func's {TRANSFORMS[kind]}: its backward is written by hand, for "
                               f"torch.autograd alone; use {instead}")
    refuse_tangents(name, instead, tensors)


def refuse_tangents(name, instead, tensors):
    """Raise RuntimeError if one of `tensors` has a forward-mode derivative."""
    if any(isinstance(x, torch.Tensor) and unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError(f"{name} has no forward-mode derivative (torch.func.jvp): use {instead}")


def refuse_batched_gradients(name, instead, *gradients):
    """Raise RuntimeError in a backward of `name` for several gradients at once, of which vmap makes one tensor."""
    if torch.compiler.is_compiling():  # dynamo cannot trace the question
        return
    for gradient in gradients:
        if gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient):
            raise RuntimeError(f"{name}'s backward for several gradients at once (is_grads_batched=True, or "
                               f"vectorize=True): call it once for each gradient, or use {instead}")
