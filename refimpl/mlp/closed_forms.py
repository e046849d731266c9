"""Bytes of plain layers, and of those that keep no hidden layer."""

from typing import NamedTuple

import torch

from .function import GATED


class _ComposedActivation(NamedTuple):
    """Of an activation of several operations: whether autograd keeps its input, how many tensors beside it, with what
    the last layer is given; the most that are made at a time, in forward and in backward."""

    input: bool
    kept: int
    forward: int
    backward: int


# relu(x)², x σ(1.702 x), and ½x (1 + tanh(√(2/π) (x + 0.044715 x³))), as transformers compose them
COMPOSED = {"relu2": _ComposedActivation(False, 2, 2, 6), "quick_gelu": _ComposedActivation(True, 2, 2, 6),
            "gelu_new": _ComposedActivation(True, 4, 3, 8)}


class MLPBytes(NamedTuple):
    """Bytes above x, the parameters and the output's gradient: what autograd keeps beside the output, and the peaks of
    forward and of backward, both with what is kept and with the output."""

    saved: int
    forward: int
    backward: int


def plain_mlp_saved_bytes(N: int, hidden: int, dtype: torch.dtype = torch.float32, *, activation: str = "gelu") -> int:
    """Return the bytes that autograd keeps of plain layers, beside x: 2·N·h·e, 4·N·h·e with a gate, e bytes each; of
    ReLU it does not keep the input. `activation` may be one of `COMPOSED`, too, whose intermediate results it keeps."""
    kept = sum(COMPOSED[activation][:2]) if activation in COMPOSED else 4 if activation in GATED else 2
    return N * hidden * dtype.itemsize * (kept - (activation in ("relu", "reglu")))


def mlp_bytes(N: int, d: int, hidden: int, dtype: torch.dtype = torch.float32, *, activation: str = "gelu",
              bias: bool = True, keep: str = "input", chunk_size: int | None = None, device: torch.device | str = "cpu",
              fused: bool = False) -> MLPBytes:
    """Return MLPBytes of a MemoryEfficientMLP for N tokens, output and all gradients included, without autocast.

        saved       m·N·h·e if keep is "hidden", else 0               m = 1, or 2 with a gate; e bytes an element
        forward     N·d·e + saved + (1 if keep is "hidden", else m)·R·h·e             R = chunk_size
        backward    saved + 2·N·d·e + P·w + max(work, narrow)         P parameters; w = 4 if 16-bit chunks are summed
        work        (1 or 2)·m·R·h·e + max(wide, h·w)                 once if keep is "hidden"; a bias's sum
        wide        R·(d + h)·4                                       16-bit chunks on a CPU: two factors in fp32
        narrow      d·h·e                                             16-bit chunks: one gradient in its own dtype

    `fused`: gate and up in one weight, whose gradient, bias and factor are of 2·h. A weight that is (in, out) changes
    nothing. Of an activation in `COMPOSED`, what is between the layers takes `forward` and `backward` tensors, R·h·e
    each; dropout and the like behind the layers are not counted.
    """
    m, e, R = 1 + (activation in GATED), dtype.itemsize, min(chunk_size or N, N)
    summed = R < N and e == 2
    w = 4 if summed else e
    keeps, widest, one = keep == "hidden", hidden * (1 + fused), R * hidden * e
    saved = m * N * hidden * e * keeps
    once_more = max(R * (d + widest) * 4 * (summed and device == "cpu"), bias * max(d, widest) * w)
    if activation in COMPOSED:
        _, kept, ahead, back = COMPOSED[activation]
        again = 0 if keeps else one
        forward, work = again + ahead * one, again + max(back * one, kept * one + once_more)
    else:
        forward, work = (1 if keeps else m) * one, (1 if keeps else 2) * m * one + once_more
    P = (1 + m) * d * hidden + bias * (d + m * hidden)
    return MLPBytes(saved, N * d * e + saved + forward,
                    saved + 2 * N * d * e + P * w + max(work, d * widest * e * summed))
