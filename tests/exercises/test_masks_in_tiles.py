"""Right answers pass, wrong and unanswered ones do not."""

import functools
import math
from itertools import pairwise

import torch
from exercises_kit import Answers, graded

from exercises import masks_in_tiles as page
from refimpl.attention.figure import computed_tiles

# --- first -----------------------------------------------------------------------------------------------------------


def band(a, b, T, S, left, right):
    first = 0 if left is None else max(0, a + S - T - left)
    end = S if right is None else min(S, b - 1 + S - T + right + 1)
    return (first, end) if first < end else (0, 0)


def band_by_search(a, b, T, S, left, right):
    left, right = (math.inf if bound is None else bound for bound in (left, right))
    seen = [j for j in range(S) if any(-left <= j - (i + S - T) <= right for i in range(a, b))]
    return (seen[0], seen[-1] + 1) if seen else (0, 0)


def band_by_mask(a, b, T, S, left, right):
    away = torch.arange(S) - (torch.arange(a, b) + S - T)[:, None]
    seen = torch.ones_like(away, dtype=torch.bool)
    if left is not None:
        seen &= away >= -left
    if right is not None:
        seen &= away <= right
    keys = seen.any(dim=0).nonzero()
    return [keys.min().item(), keys.max().item() + 1] if len(keys) else [0, 0]


def band_with_fault(a, b, T, S, left, right, *, shift=True, clipped=True, empty=True, more=0, falsy=False, ends="ab"):
    at = S - T if shift else 0
    if falsy:
        left, right = left or None, right or None
    from_query, to_query = {"ab": (a, b - 1), "aa": (a, a), "bb": (b - 1, b - 1)}[ends]
    first = 0 if left is None else from_query + at - left
    end = S if right is None else to_query + at + right + 1 + more
    if clipped:
        first, end = max(0, first), min(S, end)
    return (first, end) if first < end or not empty else (0, 0)


# --- second ----------------------------------------------------------------------------------------------------------


def tiles_of(ends, size):
    total = 0
    for first, end in zip([0, *ends], ends, strict=False):
        rows = math.ceil((end - first) / size)
        total += rows * (rows + 1) // 2
    return total


def tiles_by_rows(ends, size):
    lengths = [end - first for first, end in pairwise([0, *ends])]
    return sum(-(-min(row + size, n) // size) for n in lengths for row in range(0, n, size))


def tiles_by_the_library(ends, size):
    return len(computed_tiles(ends[-1], size, causal=True, cu_seqlens=[0, *ends]))


def tiles_with_fault(ends, size, *, anew=True, tiles=lambda n, size: -(-n // size), count=lambda n: n * (n + 1) // 2,
                     start=0):
    if not anew:
        ends = ends[-1:]
    return sum(count(tiles(end - first, size)) for first, end in zip([start, *ends], ends, strict=False))


def on_one_grid(ends, size):
    """Counts tiles of the whole batch in which some pair is seen."""
    found = set()
    for first, end in pairwise([0, *ends]):
        found |= {(i // size, j // size) for i in range(first, end) for j in range(first, i + 1)}
    return len(found)


fault, fault_t = (functools.partial(functools.partial, each) for each in (band_with_fault, tiles_with_fault))
ANSWERS = {
    page.first: Answers(
        right=[band, band_by_search, band_by_mask],
        wrong=[
            (fault(shift=False), "queries 0 … 0 of 4, 9 keys, left=None, right=0: you say (0, 1), expected (0, 6); "
                                 "query 0 stands at 5, query 0 at 5"),
            (fault(clipped=False), "8, 8 keys, left=2, right=0"),
            (fault(empty=False), "9, 4 keys, left=None, right=0"),
            (fault(more=-1), "queries 0 … 0 of 8, 8 keys, left=None, right=0: you say (0, 0), expected (0, 1)"),
            (fault(more=1), "left=None, right=0: you say (0, 2), expected (0, 1)"),
            (fault(falsy=True), "queries 0 … 0 of 8, 8 keys, left=None, right=0: you say (0, 8), expected (0, 1)"),
            (lambda a, b, T, S, left, right: band(a, b, T, S, left or None, right),
             "queries 1 … 1 of 8, 8 keys, left=0, right=0: you say (0, 2), expected (1, 2)"),
            (fault(ends="aa"), "queries 0 … 1 of 8, 8 keys, left=None, right=0"),
            (fault(ends="bb"), "8, 8 keys, left=2, right=0"),
            (lambda a, b, T, S, left, right: band(a, b, S, T, left, right), "4, 9 keys, left=None, right=0"),
            (lambda a, b, T, S, left, right: band(a, b, T, S, right, left), "left=None, right=0"),
            (lambda a, b, T, S, left, right: (band(a, b, T, S, left, right)[0], band(a, b, T, S, left, right)[1] - 1),
             "you say (0, 0), expected (0, 1)"),
            (lambda a, b, T, S, left, right: (0, S), "expected (0, 1)"),
            (lambda a, b, T, S, left, right: range(*band(a, b, T, S, left, right)), "expected 2 values")],
        same=("0, a + S - T - left → a + S - T - left, 0", "< → <=",
              "S, b - 1 + S - T + right + 1 → b - 1 + S - T + right + 1, S"),
    ),
    page.second: Answers(
        right=[tiles_of, tiles_by_rows, tiles_by_the_library],
        wrong=[
            (fault_t(anew=False), "ends [300, 424, 1024], tiles of 128: you say 36, expected 22"),
            (fault_t(count=lambda n: n * n), "ends [1024], tiles of 128: you say 64, expected 36"),
            (fault_t(count=lambda n: n), "ends [1024], tiles of 128: you say 8, expected 36"),
            (fault_t(count=lambda n: n * (n - 1) // 2), "ends [1024], tiles of 128: you say 28, expected 36"),
            (fault_t(tiles=lambda n, size: n // size), "ends [100], tiles of 128: you say 0, expected 1"),
            (fault_t(tiles=lambda n, size: n // size + 1), "ends [1024], tiles of 128: you say 45, expected 36"),
            (fault_t(tiles=lambda n, size: n / size), "ends [100], tiles of 128: you say"),
            (fault_t(tiles=lambda n, size: -(-n // 128)), "tiles of 16: you say 4, expected 24"),
            (fault_t(start=1), "ends [129], tiles of 128: you say 1, expected 3"),
            (lambda ends, size: tiles_of([end - ends[0] for end in ends[1:]], size), "you say 0, expected 36"),
            (lambda ends, size: sum(tiles_of([end], size) for end in ends), "ends [300, 424, 1024], tiles of 128: you"),
            (on_one_grid, "ends [5, 6, 7, 90], tiles of 16: you say 21, expected 24")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
