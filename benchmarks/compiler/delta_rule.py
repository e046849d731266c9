"""The cases of the gated delta rule's kernels for the compiler."""

import torch

from refimpl.attention.linear.triton_chunks import Problem, backward_launch, config_of, forward_launch, inverse_launch

from .compiled import Case
from .table import BATCH, HEADS, LENGTH, TARGETS

KERNELS = ("inverse", "forward", "states", "backward")
SIZES = (64, 128)


def cases(chips=tuple(TARGETS), chunk=64, change=lambda config: config):
    """Make {name: Case} of each kernel, dtype and head_dim; `change(config)` gives another config."""
    return {f"delta rule {kernel}, {str(dtype).removeprefix('torch.')}, d{D}, {chip}":
            Case.of(_launch(kernel, chip, dtype, D, chunk, change), TARGETS[chip])
            for chip in chips for dtype in (torch.bfloat16, torch.float32) for D in SIZES for kernel in KERNELS}


def _launch(kernel, chip, dtype, D, chunk, change):
    def tensor(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    qkv = [tensor(BATCH, HEADS, LENGTH, D) for _ in range(3)]
    log_decay, beta = (tensor(BATCH, HEADS, LENGTH, dtype=torch.float32) for _ in range(2))
    inverse = tensor(BATCH, HEADS, LENGTH, chunk, dtype=torch.float32)
    states = tensor(BATCH, HEADS, LENGTH // chunk + 1, D, D, dtype=torch.float32)
    given = {"log_decay": log_decay, "beta": beta, "inverse": inverse}
    problem = Problem(D**-0.5, True, chunk)
    config = change(config_of("forward" if kernel == "states" else kernel, chip))
    if kernel == "inverse":
        return inverse_launch(qkv[1], log_decay, beta, inverse, config)
    if kernel == "backward":
        return backward_launch(problem, *qkv, config, **given, d_out=qkv[2], states=states, dq=qkv[0], dk=qkv[1],
                               dv=qkv[2], d_log_decay=log_decay, d_beta=beta)
    if kernel == "states":
        return forward_launch(problem, *qkv, config, **given, state=None, out=None, last=None, states=states)
    return forward_launch(problem, *qkv, config, **given, state=None, out=qkv[2], last=states[:, :, 0], states=None)
