"""The Triton codec as PyTorch operators, so that fake tensors and the tracker see what it writes.

    refimpl::quantize_blocks      x (R, n) → scales (R, ⌈n/b⌉), codes (R, bytes)
    refimpl::dequantize_blocks    scales (G, R, ⌈n/b⌉), codes (G, R, bytes) → out (G, n), the mean over R

Both write to tensors that they are given, and allocate nothing. The kernels' module is imported at the first launch:
Triton decides when it is imported whether it interprets.
"""

import importlib.util

import torch
from torch import Tensor

from ...common import interpreter

HAS_TRITON = importlib.util.find_spec("triton") is not None


def check_interpreter(x):
    """Raise ValueError or RuntimeError for what Triton's interpreter gets wrong. Compiled kernels pass."""
    from .triton_codec import quantize_kernel

    interpreter.check_interpreter(quantize_kernel, x, (
        "kernel='triton' needs a GPU, or TRITON_INTERPRET=1 before anything imports Triton; on a CPU use "
        "kernel='auto'"), *["kernel='auto'"] * 2)


@torch.library.custom_op("refimpl::quantize_blocks", mutates_args=("scales", "codes"))
def quantize_blocks(x: Tensor, scales: Tensor, codes: Tensor, bits: int, block: int) -> None:
    """Write scales and codes of each row of x."""
    from .triton_codec import quantize_launch

    check_interpreter(x), check_interpreter(scales)
    if x.numel():
        quantize_launch(x, scales, codes, bits, block).run(x.device)


@torch.library.custom_op("refimpl::dequantize_blocks", mutates_args=("out",))
def dequantize_blocks(scales: Tensor, codes: Tensor, out: Tensor, bits: int, block: int) -> None:
    """Write to each row of out the mean of R rows of scales and codes."""
    from .triton_codec import dequantize_launch

    check_interpreter(out), check_interpreter(scales)
    if out.numel():
        dequantize_launch(scales, codes, out, bits, block).run(out.device)


@quantize_blocks.register_fake
@dequantize_blocks.register_fake
def _(*arguments):
    return None
