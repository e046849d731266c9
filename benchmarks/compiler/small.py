"""The cases of the kernels without a table of tiles, for the compiler: Δ, the forward of one screen, and the one that
the exercises grade with."""

import torch

from refimpl.attention.kernels.configs import DELTA
from refimpl.attention.triton_backward import delta_launch
from refimpl.papers import flash_attention_triton as paper_triton

from .compiled import Case, as_launched
from .table import BATCH, HEADS, LENGTH, TARGETS


def cases(chip="datacenter", warps=paper_triton.WARPS):
    """Make {name: Case}, in bf16, the exercises' in fp32. `warps`: of a program of the forward of one screen."""
    found = {}
    for D in (64, 128):
        q = torch.empty(BATCH, HEADS, LENGTH, D, dtype=torch.bfloat16, device="meta")
        lse = torch.empty(BATCH, HEADS, LENGTH, device="meta")
        found[f"delta, bfloat16, d{D}, {chip}"] = Case.of(delta_launch(q, q, None, lse, DELTA), TARGETS[chip])
        pointers = {f"{name}_ptr": as_launched(q) for name in ("q", "k", "v", "out")} | {"lse_ptr": as_launched(lse)}
        found[f"paper_triton, bfloat16, d{D}, {chip}"] = Case(
            f"{paper_triton.__name__}:forward_kernel", pointers | {
                "T": as_launched(LENGTH), "c": "fp32", "D": D, "M": paper_triton.M, "N": paper_triton.N}, warps, 3)
    x = as_launched(torch.empty(HEADS, LENGTH, 64, device="meta"))
    found[f"exercise, float32, d64, {chip}"] = Case(
        "exercises.flash_attention_in_triton:smallest_kernel", {
            **dict.fromkeys(("q", "k", "v", "out"), x), "T": as_launched(LENGTH), "c": "fp32", "D": 64, "BLOCK": 32},
        4, 3)
    return {name: case._replace(options={"target": TARGETS[chip]}) for name, case in found.items()}
