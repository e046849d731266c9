"""The one figure of every page: ledgers as bars, predicted above measured, over the bytes of the step in time."""

import io
from collections.abc import Mapping
from numbers import Number
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .ledger import CATEGORIES, Ledger, human

if TYPE_CHECKING:
    from ..memory.trace import Trace

# After Okabe and Ito's palette, told apart with any colour vision. A category that somebody marked takes a grey.
COLOURS = dict(zip(CATEGORIES, ("#0072B2", "#56B4E9", "#CC79A7", "#E69F00", "#F0E442", "#009E73", "#7A6A9B", "#D55E00"),
                   strict=True))
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))


class MemoryFigure(Figure):
    """A matplotlib Figure that Jupyter shows by itself, with no backend chosen."""

    def _repr_png_(self):
        picture = io.BytesIO()
        self.savefig(picture, format="png", dpi=110)
        return picture.getvalue()

    def __repr__(self):
        return f"<memory figure: {', '.join(self.labels)}>"


def plot(*traces: "Trace", predicted: Any = None, **labelled: "Trace") -> "MemoryFigure":
    """Draw traces (Tracker or Trace) side by side, one column each. Returns a matplotlib Figure.

    `plot(t)`, `plot(t, predicted=ledger)`, or with labels `plot(before=a, after=b, predicted={"after": ledger})`; a
    dict of bytes, or a trace for its peak, does for a ledger. Bars: the ledger at the peak. Below: bytes by category
    after each operation, the phases, and the peak. ValueError without a trace, for two of one label and for a
    prediction that no column has; TypeError for what is no trace and no ledger.
    """
    runs = _columns(traces, labelled)
    predicted = _predictions(predicted, runs)
    timelines = {label: trace.timeline for label, trace in runs.items()}
    peaks = {label: timeline.peak() for label, timeline in timelines.items()}
    ledgers = [peak.ledger for peak in peaks.values()] + list(predicted.values())
    highest = max(max(ledger.total for ledger in ledgers), 1)
    divisor, unit = next((size, name) for size, name in UNITS if highest >= size)

    figure = MemoryFigure(figsize=(max(8.5, 5.2 * len(runs)), 5.2), layout="constrained", facecolor="white")
    figure.labels = list(runs)
    rows = 2 if predicted else 1
    axes = figure.subplots(2, len(runs), squeeze=False, sharex=False, height_ratios=[0.34 * rows + 0.25, 3.2])
    for column, label in enumerate(runs):
        bars, line = axes[0][column], axes[1][column]
        inches = 0.85 * figure.get_figwidth() / len(runs)
        draw_bars(bars, peaks[label].ledger, predicted.get(label), divisor, highest, rows, inches)
        draw_timeline(line, timelines[label], peaks[label], divisor, highest, inches)
        bars.set_title(label.replace("_", " ") if len(runs) > 1 else "bytes at the peak", fontsize=10, loc="left")
        line.set_ylabel(unit if column == 0 else "")
    ever = [Ledger(zip(t.categories, t.nbytes.max(axis=0).tolist(), strict=True)) for t in timelines.values()]
    shown = _names(ledgers + ever)
    patches = [Patch(color=colour(name), label=name) for name in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=4 * len(runs), frameon=False, fontsize=9)
    if notes := list(dict.fromkeys(note for trace in runs.values() for note in trace.notes)):
        width = int(figure.get_figwidth() / 0.062)  # a letter at this size
        lines = [line for note in notes for line in wrap(note, width)]
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=8, color="#444444")
    return figure


def _columns(traces, labelled):
    """Return {label: trace} of `plot`'s arguments."""
    unnamed = {f"run {i}" if len(traces) > 1 else "measured": trace for i, trace in enumerate(traces)}
    if not unnamed and not labelled:
        raise ValueError("plot needs at least one trace: plot(t) or plot(before=a, after=b)")
    if unnamed.keys() & labelled:
        raise ValueError(f"two traces are called {(unnamed.keys() & labelled).pop()!r}: label them all")
    for label, trace in {**unnamed, **labelled}.items():
        if not hasattr(trace, "timeline"):
            raise TypeError(f"plot: {label} is a {type(trace).__name__}, expected what memory.track or dry_run gave")
    return {**unnamed, **labelled}


def _predictions(predicted, columns):
    """Return {label: Ledger} of `plot`'s `predicted`: one for all columns, or one for each that it names."""
    given = getattr(predicted, "peak", predicted)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"predicted={given!r}: expected a Ledger, or a dict of Ledgers by column")
    one = isinstance(given, Ledger) or all(isinstance(n, Number) and name not in columns for name, n in given.items())
    each = dict.fromkeys(columns, given) if one else given
    if set(each) - set(columns):
        raise ValueError(f"predicted for {sorted(set(each) - set(columns))}: the columns are {list(columns)}")
    ledgers = {label: getattr(ledger, "peak", ledger) for label, ledger in each.items()}
    for label, ledger in ledgers.items():
        if not isinstance(ledger, Mapping):
            raise TypeError(f"predicted for {label!r} is {ledger!r}: expected a Ledger")
    return {label: Ledger(ledger) for label, ledger in ledgers.items() if ledger}


def colour(name):
    """Return the colour of a category, the same on every page."""
    return COLOURS.get(name, "#7F7F7F")


def _names(ledgers):
    held = {name for ledger in ledgers for name in ledger}
    return [c for c in CATEGORIES if c in held] + sorted(held.difference(CATEGORIES))


def draw_bars(axes, measured, predicted, divisor, highest, rows, inches):
    """Draw ledgers as stacked horizontal bars; bytes are written in each part that has room, and the total at the end.

    `rows`: how many bars the figure's columns have at most; `inches`: how wide the axes are, roughly.
    """
    bars = {"predicted": predicted, "measured": measured} if predicted else {"measured": measured}
    below = range(rows - len(bars), rows)  # measured stands beside measured
    longest = 1.17 * highest
    for row, ledger in zip(below, bars.values(), strict=True):
        left = 0
        for name in _names([ledger]):
            nbytes = ledger[name]
            axes.barh(row, nbytes / divisor, left=left / divisor, color=colour(name), height=0.7)
            if nbytes / longest * inches > 0.08 * len(human(nbytes)):
                axes.text((left + nbytes / 2) / divisor, row, human(nbytes), color=_readable_on(colour(name)),
                          ha="center", va="center", fontsize=8)
            left += nbytes
        axes.text(left / divisor + 0.01 * highest / divisor, row, human(ledger.total), va="center", fontsize=9)
    axes.set_yticks(below, list(bars), fontsize=9)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(0, longest / divisor)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(left=False, bottom=False, labelbottom=False)


def _readable_on(background):
    red, green, blue = to_rgb(background)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"


def stack(axes, x, timeline, divisor):
    """Draw bytes by category against x, one upon the other; return the categories that had any."""
    bottom, seen = np.zeros(len(timeline)), []
    for i, name in enumerate(timeline.categories):
        top = bottom + timeline.nbytes[:, i] / divisor
        if timeline.nbytes[:, i].any():
            axes.fill_between(x, bottom, top, step="post", color=colour(name), linewidth=0)
            seen.append(name)
        bottom = top
    return seen


def draw_timeline(axes, timeline, peak, divisor, highest, inches):
    """Draw bytes by category after each operation, stacked; phases at the top, where there is room; the peak marked."""
    stack(axes, np.arange(len(timeline)), timeline, divisor)
    ceiling = 1.25 * highest / divisor
    before = 0.0
    for phase, begin, end in phases(timeline):
        wide = (end - begin) / len(timeline) * inches
        if max(before, wide) > 0.1:  # an optimizer that steps bucket by bucket would hatch the picture with borders
            axes.axvline(begin, color="#999999", linewidth=0.6, linestyle=":")
        before = wide
        if wide > 0.07 * len(phase):  # a letter at this size is 0.07 inches wide
            axes.text((begin + end) / 2, 0.985 * ceiling, phase, ha="center", va="top", fontsize=9, color="#444444")
    axes.plot([peak.index], [peak.ledger.total / divisor], marker="v", color="black", markersize=6, clip_on=False)
    where = f"{human(peak.ledger.total)}\n{peak.operation}" + (f", {peak.module}" if peak.module else "")
    side = _side(peak.index / max(len(timeline) - 1, 1) * inches, inches, max(map(len, where.split("\n"))))
    axes.annotate(where, (peak.index, peak.ledger.total / divisor), ({"left": 8, "right": -8}.get(side, 0), 6),
                  va="bottom", fontsize=8, textcoords="offset points", ha=side)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlim(0, max(len(timeline) - 1, 1))
    axes.set_ylim(0, ceiling)
    axes.set_xlabel("operation", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def _side(at, inches, letters):
    """Return how to align words at `at` inches of axes `inches` wide: beside it where there is room, else centred."""
    width = 0.11 + 0.06 * letters  # 8 points, and a letter at this size
    if at < inches / 2:
        return "left" if at + width < inches else "center"
    return "right" if width < at else "center"


def phases(timeline):
    """Return [(phase, first row, last row)] of each run of rows in one phase."""
    runs = []
    for row, op in enumerate(timeline.ops):
        if runs and runs[-1][0] == op.phase:
            runs[-1][2] = row
        else:
            runs.append([op.phase, row, row])
    return [tuple(run) for run in runs]
