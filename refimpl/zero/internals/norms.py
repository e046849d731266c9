"""The norm of all gradients, when each rank holds a part of them, and clipping by it.

    ‖g‖_p = (Σ_r Σ_{i on r} |g_i|^p)^(1/p)        ‖g‖_∞ = max_r max_{i on r} |g_i|

Each rank sends one number; a parameter counts once, however many ranks hold a part of it.
"""

import math

import torch


def local_power(gradients, norm_type, device):
    """Return Σ |g|^p over this rank's gradients, or max |g| for ∞, as an fp64 scalar."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        norm = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.promote_types(gradient.dtype, torch.float32))
        norm = norm.double()
        total = torch.maximum(total, norm) if norm_type == math.inf else total + norm**norm_type
    return total


def global_norm(comm, gradients, norm_type, replicated):
    """Return ‖g‖_p over all ranks, an fp32 scalar. `replicated`: every rank holds all gradients, so nothing is sent."""
    total = local_power(gradients, norm_type, comm.device)
    if not replicated:
        total = comm.all_reduce(total, "max" if norm_type == math.inf else "sum")
    return (total if norm_type == math.inf else total ** (1 / norm_type)).float()


@torch.no_grad()
def clip_(gradients, norm, max_norm):
    """Multiply all gradients by max_norm / norm if that is below 1, as torch.nn.utils.clip_grad_norm_ does."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device, gradient.dtype) if gradient.dtype.itemsize >= 4 else factor)
