"""The cases of the attention kernels with hooks and sinks, alone and together, and with MLA's head_dims, for the
compiler."""

from typing import NamedTuple

import torch

from refimpl.attention.kernels.configs import KERNELS, look_up
from refimpl.attention.kernels.tile import Score

from .compiled import Case
from .table import BATCH, HEADS, LENGTH, TARGETS, launch


class Variant(NamedTuple):
    """One call: head_dims of q and v, its hooks by name, and what else changes the code."""

    D: int
    V: int
    hooks: tuple = ()
    sinks: bool = False  # an argument of the forward alone
    window: int | None = None
    packed: bool = False
    ids: torch.dtype = torch.int32  # of documents, and lengths of prefixes


VARIANTS = {f"d{D} {name}": Variant(D, D, (name,)) for D in (64, 128, 256)
            for name in ("softcap", "alibi", "documents", "prefix")}
VARIANTS |= {f"d{D} sinks": Variant(D, D, sinks=True) for D in (64, 128)} | {
    "d64 sinks window": Variant(64, 64, sinks=True, window=128),  # gpt-oss
    "d256 softcap window": Variant(256, 256, ("softcap",), window=4096),  # Gemma 2
    "d128 softcap documents": Variant(128, 128, ("softcap", "documents"), ids=torch.int64),
    "d128 alibi packed": Variant(128, 128, ("alibi",), packed=True),
    "d128 prefix packed": Variant(128, 128, ("prefix",), packed=True),
    "d192 v128": Variant(192, 128),  # DeepSeek-V2 and V3: 128 + 64 of positions, and 128
    "d192 v128 packed": Variant(192, 128, packed=True)}


def cases(variants=tuple(VARIANTS), chip="datacenter", change=None):
    """Make {name: Case}, in bf16. `change`: a function of (kernel, variant, Config) that returns another Config."""
    found = {}
    for name in variants:
        variant = VARIANTS[name]
        for kernel in KERNELS[:1] if variant.sinks else KERNELS:
            config = look_up(kernel, chip, 2, max(variant.D, variant.V))
            config = change(kernel, name, config) if change else config
            found[f"{kernel}, bfloat16, {name}, {chip}"] = Case.of(_launch(kernel, variant, config), TARGETS[chip])
    return found


def _launch(kernel, variant, config):
    def tensor(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    batch = 1 if variant.packed else BATCH
    given = {"softcap": 50.0, "alibi": tensor(HEADS, dtype=torch.float32),
             "documents": tensor(batch, LENGTH, dtype=variant.ids), "prefix": tensor(BATCH, dtype=variant.ids)}
    score = Score.of(*(x if name in variant.hooks else None for name, x in given.items()))
    return launch(kernel, config, torch.bfloat16, variant.D, variant.V, batch=batch,
                  causal="prefix" not in variant.hooks, window=variant.window, packed=variant.packed, score=score,
                  sinks=tensor(HEADS) if variant.sinks else None)
