"""Draws a simulated step: a row for each rank, a bar for each instruction; beneath, the bytes that each rank holds."""

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch

from ..common.figure import UNITS, MemoryFigure
from ..common.gantt import PALETTE
from .instructions import BACKWARD, FORWARD, INPUT, WEIGHT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .step_simulation import Simulation

NAMES = {FORWARD: "forward", BACKWARD: "backward, whole", INPUT: "gradient of the input",
         WEIGHT: "gradients of the weights"}
COLOURS = dict(zip((FORWARD, INPUT, WEIGHT, BACKWARD), PALETTE, strict=False))
LETTER = 0.062  # inches, at this size
FINE = 0.05  # inches: half of narrower bars would be their border
COLUMNS = 4000  # of the image that then is drawn
MOST_LABELS = 12  # ranks with a line of their own in the legend


def drawing_data(simulation):
    """Return {(kind, chunk): (rectangles, micro-batches)} of a Simulation: rectangles (n, 3), of begin, end and rank;
    `chunk`: which of its rank's stages, from 0."""
    bars = {}
    for rank, times in enumerate(simulation.times):
        chunk = {stage: i for i, stage in enumerate(simulation.schedule.stages_of(rank))}
        for (kind, stage, j), (begin, end) in zip(simulation.schedule.ranks[rank], times, strict=True):
            rectangles, micro_batches = bars.setdefault((kind, chunk[stage]), ([], []))
            rectangles.append((begin, end, rank))
            micro_batches.append(j)
    return {key: (np.array(rectangles, dtype=float), micro_batches) for key, (rectangles, micro_batches)
            in sorted(bars.items())}


def draw(simulation: "Simulation", title: str | None = None, unit: str = "", width: float = 9.5) -> "Figure":
    """Draw a Simulation as a Gantt chart, bytes of activations beneath. Returns a matplotlib Figure.

    A bar has the number of its micro-batch where there is room; a rank's later stages are drawn paler. Beneath is a
    line for each rank: `Simulation.nbytes`; in activations, if `simulate` was given no bytes. `unit`: of the costs;
    `width`: inches.
    """
    ranks = len(simulation.times)
    lanes = min(0.32 * ranks, 5) + 0.2
    figure = MemoryFigure(figsize=(width, lanes + 2.6), layout="constrained", facecolor="white")
    figure.labels = [title or simulation.schedule.name]
    bars, lines = figure.subplots(2, 1, sharex=True, height_ratios=[lanes, 1.7])
    begin = min(times[0][0] for times in simulation.times)
    bars.set_xlim(begin, begin + simulation.step_time)
    data = drawing_data(simulation)
    _draw_bars(bars, data, ranks, (width - 1) / float(simulation.step_time), lanes / ranks)
    step, idle = (f"{float(each):g}{unit and ' ' + unit}" for each in (simulation.step_time, max(simulation.idle)))
    bars.set_title(f"{figure.labels[0]}: step {step}, idle at most {idle} on one rank", fontsize=10, loc="left")
    _draw_bytes(lines, simulation)
    lines.set_xlabel(f"time{unit and ', ' + unit}", fontsize=9)
    kinds = [kind for kind in NAMES if any(kind == key[0] for key in data)]
    figure.legend(handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds],
                  loc="outside upper center", ncols=4, frameon=False, fontsize=8)
    return figure


def _draw_bars(axes, data, ranks, inches, high):
    """Draw all bars, and micro-batches where a bar has room for them; `inches` wide is one unit of time."""
    colours = _colours(data)
    widths = np.concatenate([rectangles[:, 1] - rectangles[:, 0] for rectangles, _ in data.values()])
    if np.median(widths) * inches < FINE:
        _draw_image(axes, data, colours, ranks)
    else:
        for key, (rectangles, micro_batches) in data.items():
            _draw_polygons(axes, rectangles, colours[key])
            if high > 0.15:
                _write(axes, rectangles, micro_batches, colours[key], inches)
    shown = range(0, ranks, max(1, ranks // 16))
    axes.set_yticks(shown, [f"rank {r}" for r in shown], fontsize=9 if ranks <= 16 else 7)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)


def _colours(data):
    """Give each kind its colour, paler for each later stage of a rank: {(kind, chunk): (3,)}."""
    chunks = 1 + max(chunk for _, chunk in data)
    return {(kind, chunk): 1 - (1 - np.array(to_rgb(COLOURS[kind]))) * (1 - 0.6 * chunk / chunks)
            for kind, chunk in data}


def _draw_image(axes, data, colours, ranks):
    """Draw bars that are too fine for borders as one image, a row for each rank: for 50,000 polygons of their own
    there is no time."""
    begin, end = axes.get_xlim()
    image = np.ones((ranks, COLUMNS, 3))
    for key, (rectangles, _) in data.items():
        columns = np.rint((rectangles[:, :2] - begin) / (end - begin) * COLUMNS).astype(int)
        for (first, last), rank in zip(columns.tolist(), rectangles[:, 2].astype(int).tolist(), strict=True):
            image[rank, first : max(last, first + 1)] = colours[key]
    axes.imshow(image, extent=(begin, end, ranks - 0.5, -0.5), aspect="auto", interpolation="nearest")


def _draw_polygons(axes, rectangles, ground):
    """Draw bars of one colour as one collection."""
    begin, end, rank = rectangles.T
    corners = np.stack([begin, rank - 0.43, end, rank - 0.43, end, rank + 0.43, begin, rank + 0.43], 1)
    axes.add_collection(PolyCollection(corners.reshape(-1, 4, 2), facecolors=[ground], edgecolors="white",
                                       linewidths=0.5), autolim=False)


def _write(axes, rectangles, micro_batches, ground, inches):
    """Write numbers of micro-batches on bars that have room for them."""
    ink = "black" if ground @ (0.299, 0.587, 0.114) > 0.55 else "white"
    for (left, right, row), j in zip(rectangles, micro_batches, strict=True):
        if (right - left) * inches > 0.02 + LETTER * len(str(j)):
            axes.text((left + right) / 2, row, str(j), ha="center", va="center", fontsize=7, color=ink)


def _draw_bytes(axes, simulation):
    """Draw a line of bytes for each rank, against time."""
    ranks = len(simulation.times)
    counted = simulation.activation_bytes == simulation.kept_bytes == (1,) * simulation.schedule.stages
    peak = max(simulation.peak_bytes)
    divisor, unit = (1, "activations") if counted else next((size, name) for size, name in UNITS
                                                            if max(peak, 1) >= size)
    colours = colormaps["viridis"](np.linspace(0, 0.85, ranks))
    for rank in range(ranks):
        moments = {**dict(simulation.nbytes(rank)), simulation.step_time: 0}  # of two changes at once, both
        time, nbytes = np.array(list(moments.items()), dtype=float).T
        label = f"rank {rank}" if ranks <= MOST_LABELS or rank in (0, ranks - 1) else None
        axes.plot(time, nbytes / divisor, drawstyle="steps-post", color=colours[rank], linewidth=1.1, label=label)
    axes.set_ylim(0)
    axes.set_ylabel(f"held, {unit}", fontsize=9)
    axes.legend(frameon=False, fontsize=7, ncols=1 if ranks <= 4 else 2, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)
