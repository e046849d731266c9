"""The cases of a head's kernels for the compiler: each entry of their table, plain, with all terms of the loss, and
of the eighth of a vocabulary that 8 ranks split."""

import torch

from refimpl.cross_entropy.fused import IGNORED
from refimpl.cross_entropy.kernels.configs import KERNELS, TABLE, look_up
from refimpl.cross_entropy.kernels.tile import LossTerms, Shape
from refimpl.cross_entropy.triton_backward import backward_launches
from refimpl.cross_entropy.triton_forward import forward_launch

from .compiled import Case
from .table import TARGETS

ROWS = Shape(8192, 128256, 4096)  # a batch of Llama-3-8B
RANKS = 8
VARIANTS = {"": (False, LossTerms(-100, 0.0, 0.0, 0.0, ROWS.V), 1),
            " bias softcap": (True, LossTerms(-100, 0.1, 1e-4, 30.0, ROWS.V), 1),
            " split": (False, LossTerms(IGNORED, 0.0, 0.0, 0.0, ROWS.V), RANKS)}


def cases(chips=tuple(TARGETS), change=None):
    """Make {name: Case}. `change`: a function of (kernel, Config) that returns another Config."""
    found = {}
    for chip, itemsize in TABLE:
        dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
        for kernel in KERNELS:
            for variant, (bias, loss, ranks) in VARIANTS.items():
                if chip in chips:
                    config = look_up(kernel, chip, itemsize, loss.softcap != 0)
                    config = change(kernel, config) if change else config
                    name = f"{kernel}, {str(dtype)[6:]}{variant}, {chip}"
                    found[name] = Case.of(_launch(kernel, dtype, bias, loss, ranks, config), TARGETS[chip])
    return found


def _launch(kernel, dtype, bias, loss, ranks, config):
    shape = ROWS._replace(V=ROWS.V // ranks)
    N, V, C = shape

    def tensor(*sizes, dtype=dtype):
        return torch.empty(sizes, dtype=dtype, device="meta")

    hidden, weight, offset = tensor(N, C), tensor(V, C), tensor(V) if bias else None
    targets = tensor(N, dtype=torch.int64)
    wide = {"dtype": torch.float32}
    if kernel == "forward":
        return forward_launch(hidden, weight, offset, targets, tensor(3, N, **wide), shape, loss, config)
    used = tensor(N // config.block_m, -(-V // config.block_v), dtype=torch.int8)
    db = tensor(V, **wide) if bias else None
    launches = backward_launches(hidden, weight, offset, targets, tensor(N, **wide), tensor(**wide),
                                 tensor(N, C, **wide), tensor(V, C, **wide), db, used, shape, loss, -1.0,
                                 (config, config))
    return launches[KERNELS.index(kernel) - 1]
