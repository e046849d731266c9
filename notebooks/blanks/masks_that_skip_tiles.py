"""What readers build on the page *Masks that skip tiles*: lists of blocks, and attention over them."""

import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from exercises import drawn, off, readable
from refimpl import memory

from . import blank

HINTS = {
    "lists": [
        "`for row in range(0, T, N)` and, in it, `for column in range(0, T, N)`. A block ends at min(row + N, T).",
        "`i = torch.arange(first, end)[:, None]` is a column of queries, and `j = torch.arange(first, end)` a row of "
        "keys. `sees(i, j)` answers for the whole block.",
        "`seen.any()`: the block is listed. `seen.all()`: it is full, and its `seen` is None."],
    "attend": [
        "`q.split(N, 2)` are the blocks of queries, and `k.split(N, 2)[C]` is block C of keys.",
        "Carry m, l and O of each row, as in tiles: a new maximum m′ shrinks l and O by e^(m − m′).",
        "A row may see no key of its first blocks. Begin with m = −10³⁰, not −∞: −∞ − (−∞) is NaN."]}
MASKS = {  # {name: (the predicate, tokens, rows of a block)}
    "a causal window of 20": (lambda i, j: (j <= i) & (i - j <= 20), 100, 16),
    "a window, and three global tokens": (lambda i, j: ((i - j).abs() <= 9) | (i < 3) | (j < 3), 96, 32),
    "a dilated window": (lambda i, j: ((i - j).abs() <= 12) & ((i - j) % 4 == 0), 64, 16),
    "every pair": (lambda i, j: (i >= 0) & (j >= 0), 40, 16),
    "a causal window of 20 in 512 tokens": (lambda i, j: (j <= i) & (i - j <= 20), 512, 16)}
HOLES = {"queries from 40 on that see keys 32 … 63": (lambda i, j: (i >= 40) & (j >= 32) & (j < 64), 90, 16)}


def lists(sees, T, N):
    """Return a list for each block of queries, in order: [(C, seen), …], C ascending.

    `sees(i, j)` gets int64 tensors that broadcast, and returns booleans: whether query i
    sees key j. There are T queries and T keys, in blocks of N rows and N columns, fewer
    at the end. C is the number of a block of keys of which some pair is seen. `seen` is
    None if all its pairs are, else its booleans (rows, columns).
    """
    found = []
    for row in range(0, T, N):
        i, listed = torch.arange(row, min(row + N, T))[:, None], []
        for column in range(0, T, N):
            seen = sees(i, torch.arange(column, min(column + N, T)))
            if seen.any():
                listed.append((column // N, None if seen.all() else seen))
        found.append(listed)
    return found


def attend(q, k, v, blocks, N):
    """Return softmax(q kᵀ / √D) v over the pairs that are seen, (B, H, T, D).

    q, k and v are (B, H, T, D), and `blocks` are what `lists` returns. No other block is
    computed. Each query sees some key, but maybe none in the first block of its list.
    """
    out, keys, values = [], k.split(N, 2), v.split(N, 2)
    for q_R, listed in zip(q.split(N, 2), blocks, strict=True):
        m, total, o = -1e30, 0.0, 0.0
        for C, seen in listed:
            s = q_R @ keys[C].mT / math.sqrt(q.shape[-1])
            if seen is not None:
                s = s.masked_fill(~seen, -math.inf)
            new = s.amax(-1, keepdim=True).clamp(min=m)
            p, shrink = (s - new).exp(), (m - new).exp()
            total = shrink * total + p.sum(-1, keepdim=True)
            o, m = shrink * o + p @ values[C], new
        out.append(o / total)
    return torch.cat(out, 2)


# --- checks ----------------------------------------------------------------------------------------------------------


def wrong_lists(said, expected, of, listed):
    """Say where lists of blocks `of` queries differ from the expected ones; None if nowhere."""
    if len(said) != len(expected):
        return f"{len(said)} lists: expected {len(expected)}, one for each block of {of}"
    for at, (mine, right) in enumerate(zip(said, expected, strict=True)):
        where = f"the list of block {at} of {of}"
        if not all(isinstance(each, (tuple, list)) and len(each) == 2 for each in mine):
            return f"{where} is to have pairs (block, seen), yours is {str(mine)[:60]}"
        numbers, wanted = [[block for block, _ in each] for each in (mine, right)]
        if numbers != wanted:
            return f"{where} has blocks of {listed} {numbers}: expected {wanted}"
        for (block, seen), (_, truth) in zip(mine, right, strict=True):
            if (seen is None) != (truth is None):
                return f"{where}: block {block} is {'full' if truth is None else 'partial'}, expected `seen` to say so"
            if truth is not None and not (isinstance(seen, torch.Tensor) and seen.dtype == torch.bool
                                          and readable(seen) and torch.equal(seen.cpu(), truth)):
                return f"{where}: `seen` of block {block} is not which of its pairs are seen, {tuple(truth.shape)}"
    return None


def dense(q, k, sees):
    """Return all scores of q and k, −∞ where a pair is not seen."""
    i = torch.arange(q.shape[2])
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~sees(i[:, None], i), -math.inf)


def measured(function, *given, products, blocks, N):
    """Return (what a function returned, a sentence if it took more than listed blocks do: FLOPs of `products` matrix
    products, and in a long sequence a quarter of the bytes of its scores)."""
    with FlopCounterMode(display=False) as counter, memory.track(*given) as t:
        found = function(*given, blocks, N)
    B, H, T, D = given[0].shape
    pairs = sum(min(N, T - R * N) * min(N, T - C * N) for R, listed in enumerate(blocks) for C, _ in listed)
    flops, (most, every) = counter.get_total_flops(), (2 * products * B * H * D * each for each in (pairs, T * T))
    took, limit = t.peak.total - t.start.total, B * H * T * T
    if flops > most:
        return found, f"{flops:,} FLOPs; the listed blocks take {most:,}, and all pairs {every:,}"
    return found, f"{took:,} bytes; {limit:,} are enough, a quarter of the scores" if took > limit and T > 500 else None


@blank(lists, "blocks and pairs", [list])
def check_lists(listed):
    """Check which blocks are listed, which are full, the pairs of the others, and the bytes of the lists."""
    for name, (sees, T, N) in {**MASKS, **HOLES}.items():
        said, right = listed(sees, T, N), lists(sees, T, N)
        if wrong := wrong_lists(said, right, "queries", "keys"):
            return f"{name}, {T} tokens in blocks of {N}: {wrong}"
        took, most = ({seen.untyped_storage()._cdata: seen.untyped_storage().nbytes() for each in found
                       for _, seen in each if seen is not None} for found in (said, right))
        if sum(took.values()) > sum(most.values()):
            return (f"{name}: right, but your lists keep {sum(took.values()):,} bytes, and the partial blocks have "
                    f"{sum(most.values()):,}: is `seen` a view of the mask of all pairs?")
    return None


@blank(attend, "parity and bytes, and FLOPs", torch.Tensor)
def check_attend(attend):
    """Check the output, with large scores, too, and that no more than the listed blocks is computed."""
    for name, (sees, T, N) in {**MASKS, "a key far ahead": (
            lambda i, j: ((j <= i) & (j > i - 20) & (i % 2 == 0)) | (j == 60), 64, 16)}.items():
        q, k, v = drawn(*[(2, 3, T, 16)] * 3, scale=30)
        said, more = measured(attend, q, k, v, products=2, blocks=lists(sees, T, N), N=N)
        if wrong := off(said, dense(q, k, sees).softmax(-1) @ v, "that of the pairs that are seen"):
            return f"{name}, {T} tokens in blocks of {N}: the output{wrong}"
        if more:
            return f"{name}: right, but it takes {more}"
    return None
