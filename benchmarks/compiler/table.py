"""Cases for the compiler: each kernel in the table of refimpl/attention/kernels/configs.py, in each variant that
compiles to different code.

    named = cases(chips=["datacenter"], head_dims=[128], variants=["causal"])      {Name: Case}
    for name, found in compile_all(named): print(name, found.registers, found.faults())
"""

from typing import NamedTuple

import torch

from refimpl.attention.kernels.configs import KERNELS, TABLE, look_up
from refimpl.attention.kernels.tile import Problem
from refimpl.attention.triton_backward import backward_launches
from refimpl.attention.triton_forward import forward_launch

from .compiled import Case

# The target for each chip of the table. "any" is the oldest chip with 99 KB of shared memory.
TARGETS = {"datacenter": ("cuda", 90), "any": ("cuda", 86)}
VARIANTS = {
    "full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 100},
    "packed": {"causal": True, "packed": True}, "dropout": {"causal": True, "dropout_p": 0.1},
}
BATCH, HEADS, LENGTH = 2, 8, 4096  # the code is the same for all multiples of 16


class Name(NamedTuple):
    """Names a kernel of the table in one variant."""

    kernel: str
    chip: str
    dtype: torch.dtype
    head_dim: int
    variant: str

    def __str__(self):
        return f"{self.kernel}, {str(self.dtype).removeprefix('torch.')}, d{self.head_dim}, {self.variant}, {self.chip}"


def cases(*, chips=tuple(TARGETS), dtypes=(torch.bfloat16, torch.float32), head_dims=None, kernels=KERNELS,
          variants=tuple(VARIANTS)):
    """Make {Name: Case} of the table's entries with these chips, dtypes and largest head_dims (default: all)."""
    found = {}
    for chip, itemsize, D in TABLE:
        for dtype in dtypes:
            if chip in chips and dtype.itemsize == itemsize and (head_dims is None or D in head_dims):
                for kernel in kernels:
                    for variant in variants:
                        name = Name(kernel, chip, dtype, D, variant)
                        found[name] = case(name)
    return found


def case(name, config=None):
    """Make the Case of one Name. `config` replaces the table's Config."""
    options = {"causal": False, **VARIANTS[name.variant]}
    return Case.of(launch(name.kernel, config or config_of(name), name.dtype, name.head_dim, name.head_dim, **options),
                   TARGETS[name.chip])


def config_of(name):
    """Return the table's Config for a Name."""
    return look_up(name.kernel, name.chip, name.dtype.itemsize, name.head_dim, name.variant == "dropout")


def launch(kernel, config, dtype, D, V, *, batch=BATCH, causal=True, window=None, dropout_p=0.0, packed=False,
           score=None, sinks=None):
    """Make the Launch of an attention kernel on tensors without memory: head_dims of q and v, and what else changes
    the code. `packed`: BATCH sequences."""
    def tensor(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, v = (tensor(batch, HEADS, LENGTH, columns) for columns in (D, V))
    lse = tensor(batch, HEADS, LENGTH, dtype=torch.float32)
    starts = tensor(BATCH + 1, dtype=torch.int32) if packed else None
    seed = tensor(dtype=torch.int64) if dropout_p else None
    problem = Problem.of(q, q, D**-0.5, causal, window, dropout_p, seed, starts, starts, LENGTH, LENGTH, score, sinks)
    if kernel == "forward":
        return forward_launch(q, q, v, v, lse, problem, config)
    return dict(zip(("dkdv", "dq"), backward_launches(v, q, q, v, lse, lse, q, q, v, problem, (config, config)),
                    strict=True))[kernel]
