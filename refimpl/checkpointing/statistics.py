"""A function that runs twice has its side effects twice. BatchNorm's running averages are the known case."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _NormBase


@contextmanager
def frozen_statistics(*modules: torch.nn.Module) -> Iterator[None]:
    """Restore the running averages of every BatchNorm in `modules` at the end of this context.

    For the second run: `checkpoint(net, x, recompute_context=partial(frozen_statistics, net))`. Without it the averages
    move twice a step, by 1 − (1 − momentum)² in place of momentum, and `num_batches_tracked` counts double. Takes a
    copy of them for as long as it lasts: 8 bytes a channel and 8 a layer in fp32.
    """
    norms = (m for module in modules for m in module.modules() if isinstance(m, _NormBase))
    # copied back in place: the buffers stay the same tensors
    before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in before:
                buffer.copy_(copy)
