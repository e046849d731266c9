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
    config = config or config_of(name)
    return Case.of(launch(name, config))._replace(options={"target": TARGETS[name.chip]})


def config_of(name):
    """Return the table's Config for a Name."""
    return look_up(name.kernel, name.chip, name.dtype.itemsize, name.head_dim, name.variant == "dropout")


def launch(name, config):
    """Make the Launch of one Name, on tensors without memory."""
    def tensor(*shape, dtype=name.dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, lse = tensor(BATCH, HEADS, LENGTH, name.head_dim), tensor(BATCH, HEADS, LENGTH, dtype=torch.float32)
    options = {"causal": False, "window": None, "dropout_p": 0.0, "packed": False} | VARIANTS[name.variant]
    starts = tensor(BATCH + 1, dtype=torch.int32) if options.pop("packed") else None
    seed = tensor(dtype=torch.int64) if options["dropout_p"] else None
    problem = Problem.of(q, q, name.head_dim**-0.5, **options, seed=seed, cu_seqlens=starts, cu_seqlens_k=starts,
                         longest=LENGTH, longest_k=LENGTH)
    if name.kernel == "forward":
        return forward_launch(q, q, q, q, lse, problem, config)
    return dict(zip(("dkdv", "dq"), backward_launches(q, q, q, q, lse, lse, q, q, q, problem, (config, config)),
                    strict=True))[name.kernel]
