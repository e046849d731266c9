"""The cases of refimpl/attention/triton_hopper.py for the compiler."""

import torch

from refimpl.attention import triton_hopper as hopper

from .compiled import Case, as_launched


def cases():
    """Make {name: Case}: each head_dim that is padded to, in each dtype, with each mask, and with specialized warps."""
    return {name + " specialized" * specialize: _case(*case, specialize)
            for specialize, tiles in ((False, hopper.TILES), (True, hopper.SPECIALIZED))
            for name, case in masks_by_name(tiles).items()}


def masks_by_name(head_dims):
    """Return {name: (dtype, head_dim, causal, window, S)}."""
    masks = {"full": (False, None, 1024), "tail": (False, None, 1000), "causal": (True, None, 1024),
             "causal window": (True, 100, 1024), "window": (False, 100, 1024)}
    return {f"{str(dtype)[6:]} d{D} {name}": (dtype, D, *mask)
            for dtype in hopper.DTYPES for D in head_dims for name, mask in masks.items()}


def on_meta(dtype, D, S):
    """Make q, k, v, out and lse2 without memory."""
    q, k = (torch.empty(2, heads, rows, D, dtype=dtype, device="meta") for heads, rows in ((4, 512), (2, S)))
    return q, k, k, q, torch.empty(2, 4, 512, device="meta")


def types_of(values, not_specialized):
    """Return {name: what the compiler knows of an argument}."""
    return {name: as_launched(value, name not in not_specialized) for name, value in values.items()}


def _case(dtype, D, causal, window, S, specialize):
    values, constants, tiles = hopper.launch_arguments(*on_meta(dtype, D, S), D**-0.5, causal, window, specialize)
    return Case(f"{hopper.__name__}:forward_kernel", types_of(values, hopper.NOT_SPECIALIZED) | constants, tiles.warps,
                tiles.stages)
