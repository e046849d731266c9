"""Exercises of *How fast can a kernel be?*. No kernel runs: a reader's numbers are compared with closed forms."""

import math

import torch

from refimpl.attention import attention_flops, flash_attention_traffic
from refimpl.attention.kernels.configs import Config

from . import exercise

HINTS = {
    "first": [
        "Each of the three ways computes 4·B·H·T·T·D FLOPs. A way takes as long as the slower of the two: its FLOPs at "
        "`flops` a second, or its bytes at `bandwidth` a second.",
        "q, k, v and o have e·B·H·T·D bytes each. The dense way writes and reads two matrices of e·B·H·T·T bytes, "
        "the scores and the weights.",
        "As programs ask: q and o move once. A head has ⌈T/128⌉ programs, and each reads all k and v of its head."],
    "second": [
        "dK and dV have N·D numbers each, P and dP have M·N each. A number takes a register.",
        "A program has 255 registers for each of its 32 · warps threads.",
        "Double N from 1 on, as long as 2·N·D + 2·M·N is at most two thirds of the registers."]}

H100, T4 = (989.4e12, 3.35e12), (65e12, 320e9)  # FLOP/s, bytes/s

WAYS = "dense", "as ⌈T/128⌉ programs a head ask", "each byte once"


def _bytes(B, H, T, D, e):
    """Return the bytes of the three ways; without the logsumexp, 4 bytes a row."""
    shape, dtype = (B, H, T, D), {2: torch.bfloat16, 4: torch.float32}[e]
    traffic = flash_attention_traffic(shape, shape, dtype, configs={"forward": Config(128, 64, 8, 2)})["forward"]
    once = 4 * e * B * H * T * D
    return once + 4 * e * B * H * T * T, sum(traffic) - 4 * B * H * T, once


@exercise("seconds", (float, float, float))
def first(least):
    """Grade `least(B, H, T, D, e, flops, bandwidth)`, which returns the least seconds of a forward in three ways: with
    the matrix, as programs of 128 queries ask, and with each byte once."""
    for shape, (flops, bandwidth) in (((1, 16, 8192, 128, 2), H100), ((2, 8, 512, 64, 4), H100),
                                      ((1, 4, 128, 256, 2), T4), ((3, 2, 385, 64, 2), T4)):
        computing = attention_flops(shape[:4], shape[:4]).forward / flops
        for name, said, nbytes in zip(WAYS, least(*shape, flops, bandwidth), _bytes(*shape), strict=True):
            moving = nbytes / bandwidth
            right = max(computing, moving)
            if not math.isclose(said, right, rel_tol=1e-6):
                return (f"{shape}, {name}: {said * 1e6:,.8g} µs, expected {right * 1e6:,.8g}. The arithmetic takes "
                        f"{computing * 1e6:,.8g} and {nbytes:,} bytes take {moving * 1e6:,.8g}; the slower bounds it")
    return None


@exercise("the number of keys", int)
def second(keys_held):
    """Grade `keys_held(M, D, warps)`, which returns the largest power of two N for which dK, dV, P and dP take at most
    two thirds of a program's registers."""
    for M, D, warps in ((32, 128, 8), (64, 64, 8), (32, 64, 4), (64, 256, 8), (128, 128, 4), (64, 21, 2), (85, 256, 8)):
        registers = 255 * 32 * warps
        right = max(2**n for n in range(12) if 3 * (2 * 2**n * D + 2 * M * 2**n) <= 2 * registers)
        said = keys_held(M, D, warps)
        if said != right:
            share = (2 * said * D + 2 * M * said) / registers
            return (f"M={M}, D={D}, {warps} warps: {said:,} keys take {share:.1%} of the {registers:,} registers; "
                    f"{right} is the largest power of two within two thirds")
    return None
