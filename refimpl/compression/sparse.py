"""A few numbers of many, and their places: what `topk` and `threshold` send.

    | places, int32 | values, in the wire's dtype |        k · (4 + itemsize) bytes
"""

import torch

MOST = 2**31 - 1  # numbers that an int32 can tell apart


def count(numel, ratio):
    """Return k: ρn rounded, at least 1 number of a tensor that has any."""
    return min(numel, max(1, round(ratio * numel)))


def payload_bytes(numel, ratio, itemsize):
    """Return k · (4 + itemsize): the bytes that are sent of `numel` numbers."""
    return count(numel, ratio) * (4 + itemsize)


def pack(x, places, dtype):
    """Return the numbers of x (n,) at `places` (k,), with their places, as bytes. ValueError if n is above 2³¹ − 1."""
    if x.numel() > MOST:
        raise ValueError(f"{x.numel()} numbers in one bucket: an int32 index tells {MOST} apart. Lower bucket_bytes")
    return torch.cat([places.int().view(torch.uint8), x[places].to(dtype).view(torch.uint8)])


def add(out, payload, dtype):
    """Add what was packed to `out` (n,)."""
    k = payload.numel() // (4 + dtype.itemsize)
    places, values = payload[: 4 * k].clone(), payload[4 * k :].clone()  # so that each begins where its dtype may
    out.index_add_(0, places.view(torch.int32), values.view(dtype).to(out.dtype))
