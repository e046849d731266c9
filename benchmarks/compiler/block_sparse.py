"""The cases of the block-sparse kernels, with and without a hook, for the compiler."""

import torch

from refimpl.attention.kernels.configs import KERNELS, TABLE, look_up
from refimpl.attention.triton_block_sparse import SparseProblem, backward_launches, fitted, forward_launch

from .compiled import Case
from .table import BATCH, HEADS, LENGTH, TARGETS

HOOKS = {"": None, ", softcap": 50.0}


def cases(chips=tuple(TARGETS), hooks=tuple(HOOKS), block=128, change=lambda config: config):
    """Make {name: Case} of the table's entries; `change(config)` gives another config."""
    return {f"sparse {kernel}, {str(dtype).removeprefix('torch.')}, d{D}{hook}, {chip}":
            Case.of(_launch(kernel, chip, dtype, D, HOOKS[hook], block, change), TARGETS[chip])
            for chip, itemsize, D in TABLE if chip in chips for dtype in (torch.bfloat16, torch.float32)
            if dtype.itemsize == itemsize for kernel in KERNELS for hook in hooks}


def _launch(kernel, chip, dtype, D, softcap, block, change=lambda config: config):
    def tensor(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    config = change(fitted(look_up(kernel, chip, dtype.itemsize, D), block))
    q, k, v, out, d_out, dq, dk, dv = (tensor(BATCH, HEADS, LENGTH, D) for _ in range(8))
    lse, delta = (tensor(BATCH, HEADS, LENGTH, dtype=torch.float32) for _ in range(2))
    owners = LENGTH // block
    lists = [tensor(2 * owners + 1 + 2 * 3 * owners, dtype=torch.int32) for _ in range(2)]
    problem = SparseProblem.of(*lists, tensor(2, block, block // 32, dtype=torch.int32), block, (1, 1),
                               (LENGTH, LENGTH), D**-0.5, (softcap, None, None, None))
    if kernel == "forward":
        return forward_launch(q, k, v, out, lse, problem, config)
    return backward_launches(d_out, q, k, v, lse, delta, dq, dk, dv, problem, (config, config))[kernel == "dq"]
