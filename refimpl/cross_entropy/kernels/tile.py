"""A tile of logits and of their gradient, M rows by V words, in a program's registers; and a launch.

Hidden states (N, C), weight (V, C) and their gradients lie in memory row after row. A tile's logits are a sum over C in
blocks of K. What the loss is made of comes as numbers: 0 for no z-loss, no label smoothing and no softcap.
"""

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .configs import Config


class Shape(NamedTuple):
    """Rows, words and features, as a kernel takes them."""

    N: int
    V: int
    C: int


class LossTerms(NamedTuple):
    """What a kernel needs to know of the loss: `Terms`, without None; and the words of all ranks together."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    vocabulary: int


class Launch(NamedTuple):
    """A kernel with everything that it is launched with, or compiled with for a GPU that is not there."""

    kernel: object
    grid: tuple
    arguments: dict
    config: Config

    def run(self, device):
        """Launch on `device`: Triton itself launches on the current one."""
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self.kernel[self.grid](**self.arguments, num_warps=self.config.num_warps, num_stages=self.config.num_stages)


@triton.jit
def block(ptr, rows, first, shape, K: tl.constexpr):
    """Return the addresses of some rows of a matrix with C columns, columns first … first + K − 1."""
    columns = first + tl.arange(0, K)
    return ptr + rows.to(tl.int64)[:, None] * shape.C + columns[None, :]


@triton.jit
def inside(rows, count, first, shape, K: tl.constexpr):
    """Return which of these addresses are in a matrix of `count` rows."""
    return (rows < count)[:, None] & (first + tl.arange(0, K) < shape.C)[None, :]


@triton.jit
def capped_logits(h_ptr, w_ptr, bias_ptr, rows, words, shape, loss, M: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
                  CAPPED: tl.constexpr):
    """Return (z_MV, tanh_MV): the logits after the softcap, −∞ past the last word; and z / softcap, if CAPPED."""
    z_MV = tl.zeros([M, V], tl.float32)
    for first in tl.range(0, shape.C, K):
        h_MK = tl.load(block(h_ptr, rows, first, shape, K), inside(rows, shape.N, first, shape, K), 0.0)
        w_VK = tl.load(block(w_ptr, words, first, shape, K), inside(words, shape.V, first, shape, K), 0.0)
        z_MV = tl.dot(h_MK, w_VK.T, z_MV, input_precision="ieee")
    if bias_ptr is not None:
        z_MV += tl.load(bias_ptr + words, words < shape.V, 0.0).to(tl.float32)[None, :]
    tanh_MV = z_MV
    if CAPPED:
        tanh_MV = 2 * tl.sigmoid(2 * z_MV / loss.softcap) - 1
        z_MV = tanh_MV * loss.softcap
    return tl.where((words < shape.V)[None, :], z_MV, -float("inf")), tanh_MV


@triton.jit
def gradient(z_MV, tanh_MV, target_M, lse_M, words, shape, loss, CAPPED: tl.constexpr):
    """Return the gradient of a row's loss by its logits, 0 in rows that do not count and past the last word."""
    g_MV = tl.exp(z_MV - lse_M[:, None]) * (1 + 2 * loss.z_loss * lse_M)[:, None]
    g_MV -= tl.where(words[None, :] == target_M[:, None], 1 - loss.label_smoothing, 0.0)
    g_MV -= loss.label_smoothing / loss.vocabulary
    if CAPPED:
        g_MV *= 1 - tanh_MV * tanh_MV
    counts_MV = (target_M != loss.ignore_index)[:, None] & (words < shape.V)[None, :]
    return tl.where(counts_MV, g_MV, 0.0)
