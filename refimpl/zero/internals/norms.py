"""The norm of all gradients, when each rank holds a part of them, and clipping by it.

    ‖g‖_p = (Σ_r Σ_{i on r} |g_i|^p)^(1/p)        ‖g‖_∞ = max_r max_{i on r} |g_i|

Each rank sends one number. An element counts once, however many ranks hold it: a Shard says which part of it is its
rank's own (`sharding`).
"""

import itertools
import math
from typing import Any

import torch

from .persistence import owned_gradients


def clip_grad_norm_(engine: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm, over all parameters on all ranks of `world`, is at most `max_norm`.

    Returns the norm before, a scalar in fp32, in fp64 if there are parameters in fp64; it is NaN or inf if a gradient
    is. All ranks call it, between the last backward and the step. ValueError for a `norm_type` that is not above 0.
    """
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type}: expected a number above 0, or inf")
    engine.reducer.check_reduced()
    engine.check_phase("clip_grad_norm_")
    number = max_norm if isinstance(max_norm, (int, float)) else "a tensor"
    engine.clipped = {"norm_type": norm_type, "max_norm": number}  # ranks compare it before the step
    alone = not engine.stage and engine.world is engine.comm  # every rank has all gradients
    counted = itertools.chain.from_iterable(engine.gradients()) if alone else owned_gradients(engine)
    norm = global_norm(engine.world, counted, norm_type, alone) * getattr(engine.update, "factor", 1.0)
    if not any(bucket.dtype == torch.float64 for bucket in engine.buckets):
        norm = norm.float()
    for gradients in engine.gradients():
        clip_(gradients, norm, max_norm)
    return norm


def local_power(gradients, norm_type, device):
    """Return Σ |g|^p over this rank's gradients, or max |g| for ∞, as an fp64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in (each for each in gradients if each.numel()):  # max has no value for nothing
        # in fp32 at least: squares of 16-bit numbers overflow fp16, and a sum of them loses bits
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.promote_types(gradient.dtype, torch.float32))
        norm = norm.double().to(device)
        total = torch.maximum(total, norm) if norm_type == math.inf else total + norm**norm_type
    return total


def global_norm(comm, gradients, norm_type, replicated):
    """Return ‖g‖_p over all ranks of `comm`, an fp64 scalar. `gradients`: an iterable of those that this rank counts.
    `replicated`: every rank counts all of them, so nothing is sent."""
    total = local_power(gradients, norm_type, comm.device)
    if not replicated:
        total = comm.all_reduce(total, "max" if norm_type == math.inf else "sum")
    return total if norm_type == math.inf else total ** (1 / norm_type)


@torch.no_grad()
def clip_(gradients, norm, max_norm):
    """Multiply all gradients by max_norm / norm if that is below 1, as torch.nn.utils.clip_grad_norm_ does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # 1e-6 as in torch's own: the same factor
    for gradient in gradients:
        # a factor rounded to 16 bits would move all gradients by its rounding: it stays in fp32 beside these
        gradient.mul_(factor.to(gradient.device, gradient.dtype if gradient.dtype.itemsize >= 4 else None))
