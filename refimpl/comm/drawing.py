"""Collectives as a picture: what each rank holds before and after."""

from ..common.figure import MemoryFigure

# One colour for each rank that contributed; Okabe and Ito's palette, as in `common.figure`.
COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#0072B2", "#D55E00", "#999999")
PARTIAL, COMPLETE = "#DDDDDD", "#404040"  # a sum over some ranks, over all


def draw(panels, columns=3):
    """Draw {title: ranks} as grids: one row a rank, one cell a chunk. Returns a matplotlib Figure.

    `ranks`: for each rank a list of integers, one a chunk. Write the number of rank r in its r-th decimal digit, and
    every cell tells who is in it: 3000 is rank 3's alone, 3333 the sum of four. ValueError for no panels.
    """
    if not panels:
        raise ValueError("draw needs at least one panel: draw({'before': [[1, 2], [10, 20]]})")
    rows = -(-len(panels) // columns)
    figure = MemoryFigure(figsize=(3.1 * min(columns, len(panels)), 2.3 * rows), layout="constrained",
                          facecolor="white")
    figure.labels = list(panels)
    grid = figure.subplots(rows, min(columns, len(panels)), squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for axes, (title, ranks) in zip(grid.flat, panels.items(), strict=False):
        _draw_ranks(axes, ranks)
        axes.set_title(title, fontsize=10)
    return figure


def _draw_ranks(axes, ranks):
    width = max(len(cells) for cells in ranks)
    for rank, cells in enumerate(ranks):
        axes.text(-0.15, rank, f"rank {rank}", ha="right", va="center", fontsize=8)
        for place, value in enumerate(cells):
            fill = colour(value, len(ranks))
            ink = "white" if fill == COMPLETE else "black"
            axes.barh(rank, 0.94, left=place, height=0.84, color=fill, edgecolor="none")
            axes.text(place + 0.47, rank, f"{value}", ha="center", va="center", fontsize=8, color=ink)
    axes.set_xlim(-1.3, max(width, len(ranks)))
    axes.set_ylim(len(ranks) - 0.4, -0.6)


def colour(value, world_size):
    """Choose the colour of the one rank in `value`; light grey for a sum over several ranks, dark for one over all."""
    digits = [place for place, digit in enumerate(reversed(str(abs(int(value))))) if digit != "0"]
    if len(digits) == 1:
        return COLOURS[digits[0] % len(COLOURS)]
    return COMPLETE if len(digits) == world_size else PARTIAL
