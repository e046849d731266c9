"""Rotary positions: queries and keys are rotated by their position, so that their product knows how far apart they are.

RoFormer (Su et al. 2021), section 3.4.2, with the dimensions paired as halves, as GPT-NeoX pairs them.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .config import GPTConfig


def rotation_table(config: "GPTConfig", positions: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
    """Return cos and sin of position · base^(−2i/n) for i < n/2, n = rotary_dim: two fp32 tables (…, n) for positions
    (…), by default all of the context: (context_length, n)."""
    n = config.rotary_dim
    positions = torch.arange(config.context_length) if positions is None else positions
    frequency = config.rotary_base ** (-torch.arange(0, n, 2, dtype=torch.float32, device=positions.device) / n)
    angle = positions.float().unsqueeze(-1) * frequency  # fp32: bf16 rounds integers above 256
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_BHTD: torch.Tensor, cos_TN: torch.Tensor, sin_TN: torch.Tensor) -> torch.Tensor:
    """Rotate the first N dimensions of each head by its position's angle. The others stay the same. Tables may also be
    (B, 1, T, N), where rows have other positions."""
    n = cos_TN.shape[-1]
    turned, passed = x_BHTD[..., :n], x_BHTD[..., n:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos_TN + torch.cat((-second, first), dim=-1) * sin_TN
    return torch.cat((turned, passed), dim=-1) if passed.shape[-1] else turned
