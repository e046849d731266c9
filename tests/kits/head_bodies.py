"""What runs where Triton interprets: the fused loss, its bytes, its parts; the fused loss on ranks."""

import contextlib
import gc
from unittest import mock

import torch
from head_kit import read, split_columns, with_gradients
from triton.runtime.interpreter import GridExecutor

from refimpl.comm import launch
from refimpl.cross_entropy.fused import fused_linear_cross_entropy, fused_multi_token_cross_entropy
from refimpl.cross_entropy.kernels.configs import INTERPRETED
from refimpl.cross_entropy.kernels.tile import LossTerms, Shape
from refimpl.cross_entropy.triton_backward import backward, empty_used
from refimpl.cross_entropy.triton_forward import combined, forward


def loss_and_gradients(hidden, weight, targets, bias=None, **options):
    needs = [x for x in (hidden, weight, bias) if x is not None and x.requires_grad]
    return with_gradients(fused_linear_cross_entropy(hidden, weight, targets, bias=bias, **options), *needs)


def several(hiddens, weight, targets, scales, bias=None, **options):
    """[the weighted sum, its gradients, the losses apart]"""
    total, losses = fused_multi_token_cross_entropy(hiddens, weight, targets, scales, bias=bias, **options)
    return [*with_gradients(total, weight, bias, *hiddens), losses]


def bytes_read(hidden, weight, targets, bias=None, parts=1, autocast=False, **options):
    """As `read`, of so many losses of one head; under autocast to fp16 with hidden states in that."""
    hiddens = [hidden.detach().to(torch.float16 if autocast else hidden.dtype, copy=True).requires_grad_()
               for _ in range(parts)]
    def compute():
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            return fused_multi_token_cross_entropy(hiddens, weight, [targets] * parts, bias=bias, **options)[0]

    with collected():
        return read(compute, *hiddens, weight, targets, bias)


def tied(weight, batches, **options):
    """The gradient of a weight that is head and embedding, summed over batches of (tokens, targets)."""
    for tokens, targets in batches:
        fused_linear_cross_entropy(weight[tokens], weight, targets, **options).backward()
        assert weight.grad.untyped_storage().nbytes() == weight.nbytes
    return weight.grad


def collected():
    """The interpreter holds a launch's tensors in a cycle, which is collected in this context after each."""
    call = GridExecutor.__call__
    def run(self, *args, **kwargs):
        call(self, *args, **kwargs)
        gc.collect()

    return mock.patch.object(GridExecutor, "__call__", run)


def on_ranks(world_size, cases):
    """What `split` returns on each rank"""
    return launch(split, world_size, cases)


def split(comm, cases):
    """For each of the cases, ((N, C, V), dtype, parts, options): errors of the loss and of the gradients of hidden,
    weight and bias, of split columns beside fp64; bytes as `read`; traffic."""
    torch.use_deterministic_algorithms(comm.device.type == "cpu")
    with collected() if comm.device.type == "cpu" else contextlib.nullcontext():
        return [split_columns(comm, *case, fused_multi_token_cross_entropy) for case in cases]


def rows(hidden, weight, targets, config=INTERPRETED):
    """(lse, target's logit, sum of logits)"""
    shape = Shape(len(hidden), *weight.shape)
    return combined(forward(hidden, weight, None, targets, shape, LossTerms(-100, 0.0, 0.0, 0.0, shape.V), config))


def skipping(hidden, weight, targets, skip, hidden_needed=True):
    """(dh, dW, used) of the sum of the losses; without dh the second kernel has no notes of the first one"""
    lse, shape = torch.logsumexp(hidden @ weight.T, 1), Shape(len(hidden), *weight.shape)
    dh = used = None
    if hidden_needed:
        dh, used = torch.zeros_like(hidden), empty_used(hidden, shape.V, INTERPRETED)
    dw = torch.zeros_like(weight)
    backward(hidden, weight, None, targets, lse, torch.ones(()), dh, dw, None, used, shape,
             LossTerms(-100, 0.0, 0.0, 0.0, shape.V), skip)
    return dh, dw, used
