"""Exercises of the page *Masks in tiles*."""

import random

from refimpl.attention.call.sequences import Band
from refimpl.attention.figure import computed_tiles

from . import exercise

HINTS = {
    "first": [
        "Query i stands beside key i + S − T. It sees from `left` keys before that place to `right` keys after it.",
        "The first key is the one that query a sees first. The end is one after the last key that query b − 1 sees.",
        "Cut both to 0 … S. `None` is no bound, and 0 is one: ask `left is None`. If first ≥ end, return (0, 0)."],
    "second": [
        "A text begins where the last one ends, the first at 0. A text of n tokens has r = ⌈n / size⌉ rows of tiles.",
        "Row i of these, counted from 1, has i tiles: those on the left of the diagonal, and one on it.",
        "Add up r (r + 1) / 2 over the texts."]}


@exercise("the keys", (int, int))
def first(band):
    """Grade `band(a, b, T, S, left, right)`, which returns (first, end) of the keys that queries a … b − 1 see."""
    for T, S, left, right in ((8, 8, None, 0), (8, 8, 2, 0), (8, 8, 0, 0), (8, 8, 1, 2), (4, 9, None, 0),
                              (4, 9, 3, None), (4, 9, 0, 2), (9, 4, None, 0), (9, 4, 1, 1), (9, 4, 0, None),
                              (6, 6, None, None), (5, 7, 20, 20)):
        for a in range(T):
            for b in range(a + 1, T + 1):
                said, right_answer = tuple(band(a, b, T, S, left, right)), Band(T, S, left, right).keys_seen((a, b))
                if said != right_answer:
                    return (f"queries {a} … {b - 1} of {T}, {S} keys, left={left}, right={right}: you say {said}, "
                            f"expected {right_answer}; query {a} stands at {a + S - T}, query {b - 1} at "
                            f"{b - 1 + S - T}")
    return None


@exercise("the number of tiles", int)
def second(tiles_of):
    """Grade `tiles_of(ends, size)`, which returns the number of tiles that causal attention computes for packed texts
    that end at `ends`."""
    dice = random.Random(0)
    cases = [([1024], 128), ([100], 128), ([129], 128), ([300, 424, 1024], 128), ([100, 200, 300, 400], 100),
             ([5, 6, 7, 90], 16)]
    cases += [(sorted(dice.sample(range(1, 500), 6)), dice.randrange(8, 64)) for _ in range(5)]
    for ends, size in cases:
        said = tiles_of(list(ends), size)
        right = len(computed_tiles(ends[-1], size, causal=True, cu_seqlens=[0, *ends]))
        if said != right:
            return f"ends {ends}, tiles of {size}: you say {said}, expected {right}"
    return None
