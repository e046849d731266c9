"""The fewest recomputed blocks with which a recipe fits a budget of bytes.

With n of L blocks recomputed, evenly spread, a rank's peak falls as n grows, block by block:

    n* = min { n : peak(n / L) ≤ budget }        found by halving: a dry run for each of log2(L) guesses
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..common.ledger import human

if TYPE_CHECKING:
    from .dry import DryRank
    from .recipe import Recipe


def within(recipe: "Recipe", budget: int, layers: int, ask: Callable[["Recipe"], "DryRank"]) -> "Recipe":
    """Return the recipe with the fewest of `layers` blocks recomputed whose fullest rank holds at most `budget` bytes.

    `ask` returns the fullest rank of a recipe. ValueError if that is too little with every block recomputed.
    """
    def shared(n):
        return recipe.replace(recompute="none" if n == 0 else "blocks" if n == layers else round(n / layers, 4))

    least = ask(shared(layers)).peak
    if least.total > budget:
        raise ValueError(f"a budget of {budget:,} bytes: with every block recomputed the fullest rank still holds "
                         f"{least.total:,} ({human(least.total)}), {max(least, key=least.get)} most of all: give more "
                         "micro_batches, a higher zero, store=\"host\", or more ranks")
    return shared(bisect_left(range(layers), True, key=lambda n: ask(shared(n)).peak.total <= budget))
