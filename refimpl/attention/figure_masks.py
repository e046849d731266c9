"""The figure of the page on lists of blocks: which pairs a mask has, and which blocks are computed for them."""

from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from ..common.figure import MemoryFigure
from .masks import NONE, SOME

COLOURS = ("white", "#FBE6C6", "#F2B45C", "#9CCBEB")  # by number: see `shown`
PAIRS, LINES = 2**22, 64  # what is drawn at most: pairs one by one, and lines between blocks


def plot_masks(masks, batch=0, head=0):
    """Draw one panel for each of {name: BlockMask}, of one sequence and head: blocks that are full, partial (with the
    pairs that are seen, in masks of up to 2048 × 2048) and not listed. Titles have the densities of the whole mask.
    Returns a matplotlib Figure."""
    figure = MemoryFigure(figsize=(2.5 * len(masks) + 0.3, 3.6), layout="compressed", facecolor="white")
    figure.labels = list(masks)
    for axes, (name, mask) in zip(figure.subplots(1, len(masks), squeeze=False)[0], masks.items(), strict=True):
        axes.imshow(shown(mask, batch, head).numpy(), cmap=ListedColormap(COLOURS), vmin=0, vmax=3,
                    extent=(0, mask.S, mask.T, 0), interpolation="antialiased", interpolation_stage="rgba")
        if max(mask.grid) <= LINES:
            axes.set_xticks(range(0, mask.S, mask.block), [])
            axes.set_yticks(range(0, mask.T, mask.block), [])
            axes.grid(color="#DDDDDD", linewidth=0.5)
        axes.spines[:].set_color("#888888")
        axes.tick_params(length=0, labelbottom=False, labelleft=False)
        axes.set_title(f"{name}\n{mask.density:.1%} of pairs\nin {mask.tile_density:.1%} of blocks", fontsize=9)
        axes.set_xlabel("keys", fontsize=9)
    figure.axes[0].set_ylabel("queries", fontsize=9)
    words = ("not listed", "partial: pairs hidden", "partial: pairs seen", "full")
    patches = [Patch(facecolor=colour, edgecolor="#AAAAAA", label=label)
               for colour, label in list(zip(COLOURS, words, strict=True))[::-1]]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return figure


def shown(mask, batch=0, head=0):
    """Return a picture as numbers: 0 not listed, 1 a hidden pair of a partial block, 2 a seen one, 3 full. It has a
    number for each pair, or in a long mask for each block (2, if it is partial)."""
    at = batch * (mask.shape[0] > 1), head * (mask.shape[1] > 1)  # one that all share is drawn as the first
    kinds = mask.kinds()[at]
    picture = kinds + (kinds != NONE)
    if mask.T * mask.S > PAIRS:
        return picture
    picture = picture.repeat_interleave(mask.block, 0).repeat_interleave(mask.block, 1)[: mask.T, : mask.S]
    return picture - ((picture == 1 + SOME) & ~mask.dense()[at]).to(picture.dtype)
