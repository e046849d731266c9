"""Which tokens of a sequence each rank has: in plain order, or in zig-zag order, which balances causal attention.

    plain      rank r has chunk r of N                    causal: rank N−1 computes about 2N−1 times as much as rank 0
    zig-zag    rank r has chunks r and 2N−1−r of 2N       causal: all compute as much, in each step of a ring

"The Llama 3 Herd of Models" (2024), section 3.3.2.
"""

import torch

ORDERS = ("plain", "zig-zag")


def check_order(order):
    """Raise ValueError for an unknown order."""
    if order not in ORDERS:
        raise ValueError(f"order={order!r}: expected one of {', '.join(map(repr, ORDERS))}")


def spans(rank, world_size, length, order):
    """Return [(first, end), …]: the positions of a rank's `length` tokens in the whole sequence, in their order here.

    ValueError for an odd number of tokens in zig-zag order.
    """
    check_order(order)
    N = world_size
    if order == "plain":
        return [(rank * length, (rank + 1) * length)]
    if length % 2:
        raise ValueError(f"{length} tokens on a rank in zig-zag order: expected an even number, two chunks; cut the "
                         "sequence by shard, which can pad it, or use order='plain'")
    half = length // 2
    return [(chunk * half, (chunk + 1) * half) for chunk in (rank, 2 * N - 1 - rank)]


def positions(rank, world_size, length, order, device=None):
    """Return the positions of a rank's tokens, (length,) int64."""
    return torch.cat([torch.arange(*span, device=device) for span in spans(rank, world_size, length, order)])


def shard(x, rank, world_size, order, dim=1, pad=None):
    """Return a rank's tokens of x, whose dimension `dim` is the sequence, as a contiguous copy.

    `pad`: fills x up at the end if N (zig-zag: 2N) does not divide it; for targets −100. Causal attention of other
    tokens does not see them. ValueError if it would have to be padded and `pad` is None.
    """
    check_order(order)
    parts = world_size * (1 if order == "plain" else 2)
    missing = -x.shape[dim] % parts
    if missing and pad is None:
        raise ValueError(f"a sequence of {x.shape[dim]} tokens on {world_size} ranks in {order} order: expected a "
                         f"multiple of {parts}; shard(x, pad=…) fills it up to {x.shape[dim] + missing}")
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat((x, x.new_full(shape, pad)), dim)
    length = x.shape[dim] // world_size
    return torch.cat([x.narrow(dim, first, end - first) for first, end in spans(rank, world_size, length, order)], dim)


def in_order(x, world_size, order, dim):
    """Return the tokens of all ranks, one rank after the other in `dim`, in their order in the sequence."""
    if order == "plain":
        return x
    chunks = x.chunk(2 * world_size, dim)
    return torch.cat([*chunks[::2], *chunks[::-2]], dim)  # ranks' first chunks ascend, their second ones descend


def by_rank(x, world_size, order, dim):
    """Return a sequence as the ranks have it, one rank after the other in `dim`: the inverse of `in_order`."""
    if order == "plain":
        return x
    chunks = x.chunk(2 * world_size, dim)
    return torch.cat([chunk for r in range(world_size) for chunk in (chunks[r], chunks[-1 - r])], dim)
