"""Exercises of *How fast can a kernel be?*. No kernel runs: a reader's numbers are compared with closed forms."""

import math

import torch

from refimpl.attention import attention_flops, flash_attention_traffic
from refimpl.attention.kernels.configs import Config

from . import exercise

H100, T4 = (989.4e12, 3.35e12), (65e12, 320e9)  # FLOP/s, bytes/s

WAYS = "dense", "as asked", "each byte once"


def _bytes(B, H, T, D, e):
    """Return the bytes of the three ways; without the logsumexp, 4 bytes a row."""
    shape, dtype = (B, H, T, D), {2: torch.bfloat16, 4: torch.float32}[e]
    traffic = flash_attention_traffic(shape, shape, dtype, configs={"forward": Config(128, 64, 8, 2)})["forward"]
    once = 4 * e * B * H * T * D
    return once + 4 * e * B * H * T * T, sum(traffic) - 4 * B * H * T, once


@exercise("what is computed", (float, float, float))
def first(least):
    """Grade `least(B, H, T, D, e, flops, bandwidth)`, which returns the least seconds of a forward in three ways: with
    the matrix, as programs of 128 queries ask, and with each byte once."""
    for shape, (flops, bandwidth) in (((1, 16, 8192, 128, 2), H100), ((2, 8, 512, 64, 4), H100),
                                      ((1, 4, 128, 256, 2), T4)):
        said = least(*shape, flops, bandwidth)
        if not isinstance(said, (tuple, list)) or len(said) != 3:
            return f"expected three times: dense, as asked, each byte once; got {said!r}"
        computing = attention_flops(shape[:4], shape[:4]).forward / flops
        for name, seconds, nbytes in zip(WAYS, said, _bytes(*shape), strict=True):
            right = max(computing, nbytes / bandwidth)
            if not math.isclose(seconds, right, rel_tol=1e-6):
                bound = "the arithmetic" if right == computing else f"{nbytes:,} bytes"
                return f"{shape}, {name}: {seconds * 1e6:,.2f} µs, expected {right * 1e6:,.2f}, bound by {bound}"
    return None


@exercise("what is computed", int)
def second(keys_held):
    """Grade `keys_held(M, D, warps)`, which returns the largest power of two N for which dK, dV, P and dP take at most
    two thirds of a program's registers."""
    for M, D, warps in ((32, 128, 8), (64, 64, 8), (32, 64, 4), (64, 256, 8)):
        registers = 255 * 32 * warps
        right = max(2**n for n in range(12) if 3 * (2 * 2**n * D + 2 * M * 2**n) <= 2 * registers)
        said = keys_held(M, D, warps)
        if said != right:
            share = (2 * said * D + 2 * M * said) / registers
            return (f"M={M}, D={D}, {warps} warps: {said} keys take {share:.0%} of the registers; {right} is the "
                    "largest power of two within two thirds")
    return None
