"""A choice of blocks as a BlockMask: each query has picked some, and its block of queries lists what any of them has.

    picked (B, G, T, k)    blocks of keys that query t of group g attends to, as far as they are not later than t
    listed                 of a block of queries the union: at most k · block, and no more than there are
    pattern                whole rows, those of the queries that picked it; of a query's own block the causal part

No predicate is asked about pairs. What is made follows the picks, B · G · T · k of them, and the listed blocks.
"""

import functools

import torch

from .masks import ALL, SOME, BlockMask, lists_of, on_host, packed, pairs_of


@on_host()
def selected_mask(picked_BGTK: torch.Tensor, heads: int, block: int) -> BlockMask:
    """Return the causal mask of what each query picked: ints, −1 for none. Each query is to pick its own block.

    `heads`: query heads; those of a group share its picks. The mask has one list for each head, or for all if G is 1.
    """
    picked = picked_BGTK.detach().to("cpu", torch.int64, copy=True)
    B, G, T, _ = picked.shape
    rows, queries = -(-T // block), heads // G if G > 1 else 1
    t = torch.arange(T)
    owner = torch.arange(B * G).view(B, G, 1) * rows + t // block
    real = picked >= 0
    numbers = (owner[..., None] * rows + picked)[real]  # of pairs of blocks, over batch and groups
    listed, which = numbers.unique(return_inverse=True)
    has_row = torch.zeros(len(listed), block, dtype=torch.bool)
    has_row[which, (t % block)[:, None].expand(picked.shape)[real]] = True
    b, g, R, C = torch.unravel_index(listed, (B, G, rows, rows))
    is_all = (has_row | (R[:, None] * block + torch.arange(block) >= T)).all(1) & (R != C)
    patterns, words = _patterns(has_row, R == C, is_all)
    kinds = torch.where(is_all, ALL, SOME)
    where = [torch.stack([b, g * queries + head, R, C], 1) for head in range(queries)]
    listed = torch.cat(where), kinds.repeat(queries), patterns.repeat(queries)
    shape = B, G * queries, T, T
    lists = [lists_of(*listed, shape, block, transposed) for transposed in (False, True)]

    def sees(b, h, i, j):
        return (picked[b, h // queries, i] == (j // block)[..., None]).any(-1) & (j <= i)

    return BlockMask(sees, shape, block, lists, words, pairs_of(*listed, words, shape, block))


def _patterns(has_row, is_own, is_all):
    """Return the pattern of each block, −1 of a full one, and the words of those that differ."""
    block = has_row.shape[1]
    rows = torch.cat([packed(has_row), is_own[:, None].int()], 1)[~is_all]
    differing, number = rows.unique(dim=0, return_inverse=True)
    first = torch.empty(len(differing), dtype=torch.int64).scatter_(0, number, torch.arange(len(rows)))  # any of them
    words = -has_row[~is_all][first].int()[..., None].expand(-1, -1, block // 32)  # all bits of a row
    causal = packed(torch.ones(block, block, dtype=torch.bool).tril())
    patterns = torch.full(is_all.shape, -1, dtype=torch.int32)
    patterns[~is_all] = number.int()
    return patterns, torch.where(differing[:, -1, None, None] > 0, words & causal, words)


@functools.lru_cache(8)
@on_host()
def apart(picks: tuple, heads: int, block: int) -> BlockMask:
    """Return the mask of `picks`, (B, G, T, k) of them, by which no two queries of a block pick the same, besides the
    first block, the own and the one before: lists are as long as picks can make them. It stands for a choice where no
    values are."""
    B, G, T, top_k = picks
    t = torch.arange(T)[:, None]
    own, free = t // block, top_k - 3
    others = 1 + t % block * free + torch.arange(free)
    others = others.masked_fill(others >= own - 1, -1)  # later ones, and what is picked anyway
    picked = torch.cat([torch.zeros_like(t), own, (own - 1).clamp(min=0), others], 1)
    return selected_mask(picked.expand(B, G, T, top_k), heads, block)
