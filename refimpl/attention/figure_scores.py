"""The figures of the page on hooks and caches: what a hook does to each pair, and what a token leaves in a cache."""

import torch

from ..common.figure import MemoryFigure
from ..common.ledger import human
from .scores import hook_of

HIDDEN, CACHE = "#E6E6E6", ("#D55E00", "#E69F00", "#56B4E9", "#009E73")


def plot_hooks(calls, T, tile):
    """Draw one panel for each of {name: options}: T × T scores of one head after the hook, from 0 (dark: changed most),
    grey where a query does not see a key; the grid is tiles of `tile`. A sink is a column of its own. Returns a
    matplotlib Figure."""
    figure = MemoryFigure(figsize=(2.3 * len(calls), 2.9), layout="constrained", facecolor="white")
    figure.labels = list(calls)
    for axes, (name, options) in zip(figure.subplots(1, len(calls), squeeze=False)[0], calls.items(), strict=True):
        scores_TS = after(options, T)
        axes.set_facecolor(HIDDEN)
        axes.imshow(scores_TS.masked_fill(scores_TS.isinf(), float("nan")).numpy(), cmap="Blues_r", vmin=-8, vmax=2,
                    extent=(0, T, T, 0), interpolation="nearest")
        axes.set_xticks(range(0, T + 1, tile), [])
        axes.set_yticks(range(0, T + 1, tile), [])
        axes.grid(color="#888888", linewidth=0.5)
        if "sinks" in options:
            axes.axvspan(-2.5, -1, color="#E69F00")
            axes.set_xlim(-3, T)
        axes.tick_params(length=0)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("keys", fontsize=9)
    figure.axes[0].set_ylabel("queries", fontsize=9)
    return figure


def after(options, T):
    """Return the (T, T) scores of one head, all 0 before, after the options `score` and `causal`."""
    zeros, position, one = torch.zeros(1, 1, T, T), torch.arange(T), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    hook = hook_of(options.get("score"))
    scores = zeros if hook is None else hook.forward(zeros, one, one[0], position[:, None], position)
    later = position[:, None] < position
    return (scores.masked_fill(later, -torch.inf) if options.get("causal") else scores)[0, 0]


def plot_cache(bytes_by_name, title):
    """Draw bars of {name: bytes}: what one token leaves in a cache, absolute. Returns a matplotlib Figure."""
    figure = MemoryFigure(figsize=(7.5, 0.5 * len(bytes_by_name) + 0.9), layout="constrained", facecolor="white")
    figure.labels = list(bytes_by_name)
    axes, most = figure.subplots(), max(bytes_by_name.values())
    for place, nbytes in enumerate(bytes_by_name.values()):
        axes.barh(place, nbytes, color=CACHE[place % len(CACHE)])
        axes.text(nbytes + most / 100, place, human(nbytes), va="center", fontsize=9)
    axes.set_yticks(range(len(bytes_by_name)), list(bytes_by_name), fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * most)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left")
    return figure
