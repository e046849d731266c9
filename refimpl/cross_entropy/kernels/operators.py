"""The Triton kernels as PyTorch operators, so that fake tensors, torch.compile and the tracker see them.

A kernel that is just launched is invisible to all of these: they see operators. Each has a fake kernel, which gives the
shapes of its results without computing them.

    refimpl::head_forward      hidden, weight, bias, targets → (parts, 3, N): logsumexp, target's logit, sum of logits
    refimpl::head_backward     the same, lse, scale; adds to dh, dW and db, notes which tiles were used

The kernels' modules are imported at the first launch: Triton decides when it is imported whether it interprets.
"""

import torch
from torch import Tensor

from ...common import interpreter
from .configs import config_for

LIBRARY = "refimpl"


def check_interpreter(hidden):
    """Raise ValueError or RuntimeError for what Triton's interpreter gets wrong. Compiled kernels pass."""
    from ..triton_forward import forward_kernel

    interpreter.check_interpreter(forward_kernel, hidden, (
        "Triton's kernels need a GPU, or TRITON_INTERPRET=1 before anything imports Triton; on a CPU use "
        "chunked_linear_cross_entropy"), *["chunked_linear_cross_entropy"] * 2)


@torch.library.custom_op(f"{LIBRARY}::head_forward", mutates_args=())
def head_forward(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, ignore_index: int,
                 label_smoothing: float, z_loss: float, softcap: float, vocabulary: int) -> Tensor:
    """Return (parts, 3, N) in fp32: logsumexp, the target's logit and the sum of logits of each row, for each part."""
    from ..triton_forward import forward
    from .tile import LossTerms, Shape

    check_interpreter(hidden)
    return forward(hidden, weight, bias, targets, Shape(*hidden.shape[:1], *weight.shape),
                   LossTerms(ignore_index, label_smoothing, z_loss, softcap, vocabulary))


@head_forward.register_fake
def _(hidden, weight, bias, targets, *rest):
    from ..triton_forward import empty_parts

    return empty_parts(hidden, len(weight), config_for("forward", hidden.device, hidden.dtype))


@torch.library.custom_op(f"{LIBRARY}::head_backward", mutates_args=("dh", "dw", "db", "used"))
def head_backward(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, lse: Tensor, scale: Tensor,
                  dh: Tensor | None, dw: Tensor | None, db: Tensor | None, used: Tensor | None, ignore_index: int,
                  label_smoothing: float, z_loss: float, softcap: float, vocabulary: int, skip: float) -> None:
    """Add to dh and db, in fp32, and dW; None where none is asked. `triton_backward.backward` says more."""
    from ..triton_backward import backward
    from .tile import LossTerms, Shape

    backward(hidden, weight, bias, targets, lse, scale, dh, dw, db, used, Shape(*hidden.shape[:1], *weight.shape),
             LossTerms(ignore_index, label_smoothing, z_loss, softcap, vocabulary), skip)


@head_backward.register_fake
def _(*given):
    return None
