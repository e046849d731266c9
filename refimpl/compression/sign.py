"""Sends the sign of each number in one bit, and a scale of each block: ⌈n/8⌉ + 4⌈n/1024⌉ bytes.

    s = mean |x| in each block of 1024;   x̂ = s · sign(x), with sign(0) = 1

"1-bit stochastic gradient descent" (Seide et al. 2014) begins with error feedback; "Error feedback fixes SignSGD"
(Karimireddy et al. 2019), algorithm 1, has this scale, and shows that without error feedback it need not converge.
"""

import torch

from .blocks import in_blocks, scales_and_codes, split_scales_and_codes

BLOCK = 1024


class Sign:
    """The algorithm `"sign"` on flat tensors (n,). An inf or NaN makes its block inf or NaN."""

    summed = False  # each rank has scales of its own

    def __init__(self, ratio):
        """Take any ratio: all signs are sent."""

    def payload_bytes(self, numel, itemsize):
        """Return the bytes that are sent of `numel` numbers, whatever their dtype."""
        return -(-numel // 8) + 4 * -(-numel // BLOCK)

    def encode(self, x, dtype, seed):
        """Return what is sent of x (n,), as bytes."""
        sums = in_blocks(x.abs(), BLOCK).sum(1, keepdim=True)
        # Zeros that fill the last block do not count.
        counts = in_blocks(torch.ones_like(x), BLOCK).sum(1, keepdim=True)
        bits = in_blocks((x >= 0).to(torch.uint8), 8) << torch.arange(8, dtype=torch.uint8, device=x.device)
        return scales_and_codes(sums / counts, bits.sum(1, dtype=torch.uint8))

    def add(self, out, payload, dtype, seed):
        """Add what was sent to `out` (n,)."""
        scales, codes = split_scales_and_codes(payload, out.numel(), BLOCK)
        bits = codes.view(-1, 1) >> torch.arange(8, dtype=torch.uint8, device=out.device) & 1
        signs = in_blocks(bits.view(-1)[: out.numel()].to(out.dtype) * 2 - 1, BLOCK)
        out.add_((signs * scales).view(-1)[: out.numel()])
