"""Sends each number as one of 255 steps of its block: n + 4⌈n/256⌉ bytes.

    s = max |x| / 127 in each block of 256;   q = round(x / s) as int8;   x̂ = s · q

"8-bit approximations for parallelism in deep learning" (Dettmers 2016) sends gradients in 8 bits; blocks are those of
"8-bit optimizers via block-wise quantization" (Dettmers et al. 2022), section 2.1.
"""

import torch

from .blocks import in_blocks, scales_and_codes, split_scales_and_codes

BLOCK = 256


class Int8:
    """The algorithm `"int8"` on flat tensors (n,). An inf or NaN makes its block NaN."""

    summed = False  # each rank has scales of its own

    def __init__(self, ratio):
        """Take any ratio: all numbers are sent."""

    def payload_bytes(self, numel, itemsize):
        """Return the bytes that are sent of `numel` numbers, whatever their dtype."""
        return numel + 4 * -(-numel // BLOCK)

    def encode(self, x, dtype, seed):
        """Return what is sent of x (n,), as bytes."""
        blocks = in_blocks(x, BLOCK)
        # 0 · Σ is NaN if the block has an inf or NaN: no rank misses it.
        scales = blocks.abs().amax(1, keepdim=True).float() / 127 + 0 * blocks.sum(1, keepdim=True).float()
        steps = (blocks / torch.where(scales == 0, 1, scales)).nan_to_num(0).round().clamp(-127, 127).to(torch.int8)
        return scales_and_codes(scales, steps.view(-1)[: x.numel()])

    def add(self, out, payload, dtype, seed):
        """Add what was sent to `out` (n,)."""
        scales, codes = split_scales_and_codes(payload, out.numel(), BLOCK)
        out.add_((in_blocks(codes.view(torch.int8).to(out.dtype), BLOCK) * scales).view(-1)[: out.numel()])
