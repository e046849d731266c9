"""The kernels of the table in `configs.py`, ready for the compiler: each entry, in each variant that has code of its
own. `compiled.py` says what became of them, on any machine.

    names = cases(chips=["datacenter"], head_dims=[128], variants=["causal"])      {Name: Case}
    for name, found in compile_all(names): print(name, found.registers, found.faults())
"""

import concurrent.futures
import os
from typing import NamedTuple

import torch

from .compiled import Case, compile_cases
from .configs import KERNELS, TABLE, look_up
from .triton_backward import backward_launches
from .triton_forward import forward_launch
from .triton_tile import Problem

# What a chip of the table is compiled for: of those of 99 KB of shared memory, the oldest.
TARGETS = {"datacenter": ("cuda", 90), "any": ("cuda", 86)}
VARIANTS = {
    "full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 100},
    "packed": {"causal": True, "packed": True}, "dropout": {"causal": True, "dropout_p": 0.1},
}
BATCH, HEADS, LENGTH = 2, 8, 4096  # the code is the same for all that are multiples of 16
SHARE = 8  # cases for one process, which takes about two seconds to start


class Name(NamedTuple):
    """Which kernel of the table, and in which variant."""

    kernel: str
    chip: str
    dtype: torch.dtype
    head_dim: int
    variant: str

    def __str__(self):
        return f"{self.kernel}, {str(self.dtype).removeprefix('torch.')}, d{self.head_dim}, {self.variant}, {self.chip}"


def cases(*, chips=tuple(TARGETS), dtypes=(torch.bfloat16, torch.float32), head_dims=None, kernels=KERNELS,
          variants=tuple(VARIANTS)):
    """{Name: Case} of the table's entries: those of these chips, dtypes and largest head_dims (default: all)."""
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
    """The Case of one Name, with the table's Config or another one."""
    config = config or config_of(name)
    return Case.of(launch(name, config))._replace(options={"target": TARGETS[name.chip]})


def config_of(name):
    """The table's Config for a Name."""
    return look_up(name.kernel, name.chip, name.dtype.itemsize, name.head_dim, name.variant == "dropout")


def launch(name, config):
    """The Launch of one Name, on tensors that are not there."""
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


def compile_all(named, processes=None):
    """Compile {name: Case} in several processes (default: as many as this one may use cores); yields (name, Compiled)
    as they are done, or (name, RuntimeError) for one that does not compile."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    names = list(named)
    with concurrent.futures.ThreadPoolExecutor(processes or cores) as pool:
        shares = [pool.submit(_compile, {name: named[name] for name in names[i : i + SHARE]})
                  for i in range(0, len(names), SHARE)]
        try:
            for share in concurrent.futures.as_completed(shares):
                yield from share.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _compile(named):
    """[(name, Compiled or RuntimeError)]: if a share fails, its halves are tried, down to the case that is at fault."""
    try:
        return list(zip(named, compile_cases(named.values()), strict=True))
    except RuntimeError as error:
        if len(named) == 1:
            return [(name, error) for name in named]
        names = list(named)
        middle = len(names) // 2
        return [pair for half in (names[:middle], names[middle:]) for pair in _compile({n: named[n] for n in half})]
