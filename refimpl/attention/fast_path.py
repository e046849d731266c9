"""Which forward runs: Hopper's where it suits and has proved itself, the pointers' kernel everywhere else.

The fast path stands on more of the compiler than the other one: descriptors, bounds that hardware checks, the order of
what is in flight. All of that changes from one version of Triton to the next. So before it is trusted with a kind of
call, on a device, it computes a small one of the kind that the other kernel computes too, at the first such call; if
the two differ, a warning says so once, and the slow path goes on. (Before CUDA graphs are captured, call it once.)
"""

import functools
import warnings

import torch
import triton

from . import hopper, triton_forward
from .triton_tile import Problem


def forward(q_BHTD, k_BGSD, v_BGSD, problem, causal, window):
    """(out_BHTD, lse2_BHT), as `triton_forward.forward` gives them."""
    if problem.packed is None and problem.dropout is None and hopper.suits(q_BHTD, k_BGSD, v_BGSD) and proved(
            q_BHTD.device, q_BHTD.dtype, q_BHTD.shape[-1], causal, window is not None):
        return hopper.forward(q_BHTD, k_BGSD, v_BGSD, scale=problem.scale, causal=causal, window=window)
    return triton_forward.forward(q_BHTD, k_BGSD, v_BGSD, problem)


@functools.cache
@torch.no_grad()
def proved(device, dtype, D, causal, windowed):
    """Whether both paths agree on calls of this kind: 2 query heads on 1, with T = S and with T < S."""
    generator = torch.Generator(device=device).manual_seed(0)
    window, errors = 100 if windowed else None, []
    for T, S in ((300, 300), (200, 512)):
        q, k, v = (torch.randn(1, heads, rows, D, generator=generator, device=device).to(dtype)
                   for heads, rows in ((2, T), (1, S), (1, S)))
        problem = Problem.of(q, k, D**-0.5, causal, window, 0.0, None, None, None, 0, 0)
        both = zip(hopper.forward(q, k, v, scale=D**-0.5, causal=causal, window=window),
                   triton_forward.forward(q, k, v, problem), strict=True)
        errors += [(ours.float() - other.float()).abs().max().item() for ours, other in both]
    if all(error <= 0.02 for error in errors):  # values are of the order of 1, and a 16-bit rounding is below 0.01
        return True
    warnings.warn(f"flash_attention's fast path is not used: with Triton {triton.__version__} on {device} it is off by "
                  f"{errors} for {dtype}, head_dim={D}, causal={causal}, window={windowed}; the other path goes on",
                  RuntimeWarning, stacklevel=2)
    return False
