"""The cases of the attention kernels with hooks and sinks, and with MLA's head_dims, for the compiler."""

import torch

from ...attention.kernels.configs import KERNELS, look_up
from ...attention.kernels.tile import Problem, Score
from ...attention.triton_backward import backward_launches
from ...attention.triton_forward import forward_launch
from .compiled import Case
from .table import BATCH, HEADS, LENGTH, TARGETS

# name → (head_dim, that of v, the hook, sinks?); a sink is an argument of the forward alone.
VARIANTS = {f"d{D} {name}": (D, D, name, name == "sinks") for D in (64, 128)
            for name in ("softcap", "alibi", "documents", "prefix", "sinks")}
VARIANTS["d192 v128"] = (192, 128, None, False)  # DeepSeek-V2 and V3: 128 + 64 of positions, and 128


def cases(variants=tuple(VARIANTS), chip="datacenter", change=None):
    """Make {name: Case}, in bf16. `change`: a function of (kernel, variant, Config) that returns another Config."""
    found = {}
    for variant in variants:
        D, V, hook, sinks = VARIANTS[variant]
        for kernel in KERNELS[:1] if sinks else KERNELS:
            config = look_up(kernel, chip, 2, max(D, V))
            config = change(kernel, variant, config) if change else config
            found[f"{kernel}, bfloat16, {variant}, {chip}"] = Case.of(
                _launch(kernel, variant, config))._replace(options={"target": TARGETS[chip]})
    return found


def _launch(kernel, variant, config):
    D, V, hook, sinks = VARIANTS[variant]

    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    q, v = (tensor(BATCH, HEADS, LENGTH, columns) for columns in (D, V))
    lse = tensor(BATCH, HEADS, LENGTH, dtype=torch.float32)
    score = {None: None, "sinks": None, "softcap": (50.0, None, None, None),
             "alibi": (None, tensor(HEADS, dtype=torch.float32), None, None),
             "documents": (None, None, tensor(BATCH, LENGTH, dtype=torch.int32), None),
             "prefix": (None, None, None, tensor(BATCH, dtype=torch.int32))}[hook]
    problem = Problem.of(q, q, D**-0.5, hook != "prefix", None, 0.0, None, None, None, 0, 0,
                         score and Score.of(*score), tensor(HEADS) if sinks else None)
    if kernel == "forward":
        return forward_launch(q, q, v, v, lse, problem, config)
    return dict(zip(("dkdv", "dq"), backward_launches(v, q, q, v, lse, lse, q, q, v, problem, (config, config)),
                    strict=True))[kernel]
