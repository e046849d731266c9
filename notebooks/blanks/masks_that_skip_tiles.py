"""What readers build on the page *Masks that skip tiles*: lists of blocks, and attention over them."""

import math

import torch

from exercises import drawn, off
from exercises.masks_that_skip_tiles import HOLES, MASKS, blocks_of, dense, measured, wrong_lists

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


@blank(lists, "blocks and pairs", [list])
def check_lists(listed):
    """Check which blocks are listed, which are full, the pairs of the others, and the bytes of the lists."""
    for name, (sees, T, N) in {**MASKS, **HOLES}.items():
        said, right = listed(sees, T, N), blocks_of(sees, T, N)
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
        said, more = measured(attend, q, k, v, products=2, blocks=blocks_of(sees, T, N), N=N)
        if wrong := off(said, dense(q, k, sees).softmax(-1) @ v, "that of the pairs that are seen"):
            return f"{name}, {T} tokens in blocks of {N}: the output{wrong}"
        if more:
            return f"{name}: right, but it takes {more}"
    return None
