"""Recomputation in its simplest form: one autograd.Function. The first step of the story, and not the last.

Forward runs `fn` without a graph, so that nothing is saved but the inputs. Backward runs it once more, with a graph,
and goes back through that. "Training Deep Nets with Sublinear Memory Cost" (Chen et al. 2016), section 3.

What it cannot do, each of which `checkpoint` can: keyword arguments, and tensors inside lists (autograd.Function sees
positional tensors); a gradient for the parameters where no input asks for one (tokens, the first block); the same
random numbers again, so that dropout's gradient is wrong; `torch.autograd.grad` and second derivatives; letting a
recomputed tensor go before the whole region is through its backward.
"""

from collections.abc import Callable
from typing import Any

import torch


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, *inputs):
        ctx.fn = fn
        ctx.save_for_backward(*inputs)
        return fn(*inputs)  # runs under no_grad, as every forward of an autograd.Function

    @staticmethod
    def backward(ctx, *gradients):
        inputs = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        with torch.enable_grad():
            outputs = ctx.fn(*inputs)
        torch.autograd.backward(outputs, gradients)  # parameters that fn uses get their gradients here
        return None, *(x.grad for x in inputs)


def reentrant_checkpoint(fn: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Call `fn(*inputs)`, keep the inputs alone, and run `fn` again in backward. For reading: use `checkpoint`.

    `inputs` are tensors, one of which needs a gradient; `fn` returns tensors. What it cannot do is said above.
    "Training Deep Nets with Sublinear Memory Cost" (Chen et al. 2016).
    """
    return _Recompute.apply(fn, *inputs)
