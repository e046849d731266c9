"""A GPU's kernels, for a dry run on a machine without it: `memory.dry_run(step, gpu=kernels_of("a100-80"))`."""

from dataclasses import dataclass
from typing import Any

import torch

from .. import catalog
from ..mixed_precision.internals import casting_kernels as kernels
from ..mixed_precision.internals import lists
from ..mixed_precision.internals.autocast_regions import AutocastRegion


@dataclass(frozen=True)
class Kernels:
    """What PyTorch asks of a GPU when it chooses kernels. `casts(library)` puts its lists of torch.autocast there."""

    name: str
    capability: tuple
    processors: int
    casts: object


def kernels_of(name: str) -> Any:
    """Return the Kernels of a GPU of the catalog. ValueError for an unknown name and for a GPU not of NVIDIA's."""
    found = catalog.hardware(name)
    if found.capability is None:
        raise ValueError(f"gpu={name!r}: PyTorch's kernels on it are not known; give a GPU of NVIDIA's")
    return Kernels(found.name, tuple(found.capability), found.processors, as_cuda_casts)


def as_cuda_casts(library):
    """Put kernels for CUDA's lists in `library` where they differ from the CPU's, for `torch.autocast("cpu")`: what
    region a program opens, its casts are a GPU's. They last as long as the library does. An operation that both lists
    treat alike keeps PyTorch's own kernel, with its cache of weights."""

    def casting(operation, policy):
        apply = kernels.POLICIES[policy](operation)

        def cast_and_call(*args, **kwargs):
            region = AutocastRegion(None, "cpu", torch.get_autocast_dtype("cpu"))
            with torch._C._DisableAutocast():
                call, args, kwargs = apply(region, operation, args, kwargs)
                return call(*args, **kwargs)

        return cast_and_call

    cuda, cpu = lists.POLICIES["cuda"], lists.POLICIES["cpu"]
    for name in sorted(cuda.keys() | cpu.keys()):
        operation = kernels.operation(name)
        if operation is None or cuda.get(name) == cpu.get(name):
            continue
        full = f"aten::{name}"
        if name in cuda and torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCUDA"):
            library.impl(operation, casting(operation, cuda[name]), "AutocastCPU")
        elif torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastCPU"):
            library.impl(operation, torch.library.fallthrough_kernel, "AutocastCPU")

