"""Losses of the same training, done in several ways, over each other."""

from ..common.figure import MemoryFigure

COLOURS = ("#444444", "#0072B2", "#D55E00", "#009E73", "#CC79A7")


def plot_losses(curves, each=1):
    """Draw `curves`, {name: losses}, the first as the broad line under the others, and below how far these are from it.

    `each`: steps from point to point. Returns a matplotlib Figure. ValueError for no curves.
    """
    if not curves:
        raise ValueError("plot_losses needs at least one curve: plot_losses({'uncompressed': losses})")
    figure = MemoryFigure(figsize=(8.5, 4.6), layout="constrained", facecolor="white")
    figure.labels = list(curves)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    base = next(iter(curves.values()))
    for i, (name, losses) in enumerate(curves.items()):
        steps = [each * (k + 0.5) for k in range(len(losses))]
        style = {"color": COLOURS[i % len(COLOURS)], "linewidth": 1.4, "linestyle": ("-", "--", ":")[i % 3]}
        if i == 0:
            style = {"color": "#BBBBBB", "linewidth": 6}
        above.plot(steps, losses, label=name, **style)
        below.plot(steps, [loss - other for loss, other in zip(losses, base, strict=True)], **style)
    below.set_xlabel("step", fontsize=9)
    above.set_ylabel("loss, nats", fontsize=9)
    below.set_ylabel("difference", fontsize=9)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False, fontsize=9)
    return figure
