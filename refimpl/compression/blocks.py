"""Numbers in blocks, each with a scale of its own, for algorithms that send few bits of each number."""

import torch
from torch.nn import functional as F


def in_blocks(x, size):
    """Return x (n,) as (blocks, size); zeros fill the last one."""
    return F.pad(x, (0, -x.numel() % size)).view(-1, size)


def scales_and_codes(scales, codes):
    """Return fp32 scales and uint8 codes as one payload of bytes."""
    return torch.cat([scales.float().view(-1).view(torch.uint8), codes.view(-1).view(torch.uint8)])


def split_scales_and_codes(payload, numel, size):
    """Return the scales (blocks, 1), and the codes as bytes, of a payload."""
    scales = 4 * -(-numel // size)
    return payload[:scales].clone().view(torch.float32).view(-1, 1), payload[scales:]
