"""Exercises of the page *Masks in tiles*."""

from refimpl.attention.call.sequences import Band
from refimpl.attention.figure import computed_tiles

from . import exercise


@exercise("what is computed", (int, int))
def first(band):
    """Grade `band(a, b, T, S, left, right)`, which returns (first, end) of the keys that queries a … b − 1 see."""
    for T, S, left, right in ((8, 8, None, 0), (8, 8, 2, 0), (8, 8, 1, 2), (4, 9, None, 0), (4, 9, 3, None),
                              (9, 4, None, 0), (9, 4, 1, 1), (6, 6, None, None)):
        for a in range(T):
            for b in range(a + 1, T + 1):
                said, right_answer = band(a, b, T, S, left, right), Band(T, S, left, right).keys_seen((a, b))
                if said != right_answer:
                    return (f"queries {a} … {b - 1} of {T}, {S} keys, left={left}, right={right}: {said}, expected "
                            f"{right_answer}")
    return None


@exercise("what is computed", int)
def second(tiles_of):
    """Grade `tiles_of(ends, size)`, which returns the number of tiles that causal attention computes for packed texts
    that end at `ends`."""
    for ends, size in (([1024], 128), ([300, 424, 1024], 128), ([100, 200, 300, 400], 100), ([5, 6, 7, 90], 16)):
        said = tiles_of(ends, size)
        right = len(computed_tiles(ends[-1], size, causal=True, cu_seqlens=[0, *ends]))
        if said != right:
            return f"ends {ends}, tiles of {size}: {said}, expected {right}"
    return None
