"""The figures of the pages on attention: peaks over the sequence's length, an online softmax by hand, the tiles that
are computed, how near the chip's rates a computation can come, and how near kernels do."""

import math

import torch
from matplotlib.patches import Patch, Rectangle

from ..common.figure import MemoryFigure
from ..common.ledger import human
from .call.sequences import tiles
from .reference import resolve_shapes

COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7")
ROOFLINE = (*COLOURS, "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito's, safe for colour-blind readers
READ, GONE, CHANGED = "#F6C667", "#E6E6E6", "#BFE0F5"
WHOLE, MASKED = "#9CCBEB", "#F2B45C"


def plot_peaks(predicted, measured, over="tokens", slopes=True, count=human):
    """Plot bytes over tokens, both on log axes: `predicted` as lines, `measured` as points on them.

    Both are {name: {tokens: bytes}}, of at most eight names. A line's label says its slope at the end, d log(bytes) / d
    log(tokens), but for `slopes=False`. `over`: the words below the axis. `count`: a function that writes a number, of
    FLOPs for example. Returns a matplotlib Figure. Raises ValueError for measurements of a name that has no line.
    """
    if not set(measured) <= set(predicted):
        raise ValueError(f"measured {sorted(set(measured) - set(predicted))}: expected some of {sorted(predicted)}")
    figure = _figure(predicted, 8.5, 4.4)
    axes = figure.subplots()
    for colour, (name, line) in zip(ROOFLINE, predicted.items(), strict=False):
        axes.plot(list(line), list(line.values()), color=colour,
                  label=f"{name}, slope {slope(line):.2f} at the end" if slopes else name)
        points = measured.get(name, {})
        axes.plot(list(points), list(points.values()), "o", color=colour, markersize=6)
    if measured:
        axes.plot([], [], "o", color="#444444", label="measured")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ticks = sorted({tokens for line in predicted.values() for tokens in line})
    axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks], fontsize=8)
    axes.yaxis.set_major_formatter(lambda number, _: count(number).replace(".0 ", " "))
    axes.tick_params(axis="y", labelsize=8)
    axes.minorticks_off()
    axes.grid(color="#EEEEEE")
    axes.set_xlabel(over, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    return figure


def slope(line):
    """Return d log(bytes) / d log(tokens) between the two longest sequences of {tokens: bytes}."""
    short, long = sorted(line)[-2:]
    return math.log(line[long] / line[short]) / math.log(long / short)


def plot_online(scores_TS, states, size):
    """Draw the online softmax of `scores_TS`, one panel for each tile of `size` keys: the tile that was read, and
    beside it the running m, l and O after it, coloured where a new maximum made the old ones shrink.

    `states`: (shrink, m, l, O) after each tile, tensors (T, 1). Returns a matplotlib Figure.
    """
    T, S = scores_TS.shape
    figure = _figure([f"online softmax, {T} queries, {S} keys"], 4.8 * len(states), 0.42 * T + 1.2)
    spans = tiles((0, S), size)
    for axes, (first, end), state in zip(figure.subplots(1, len(states), squeeze=False)[0], spans, states, strict=True):
        for i in range(T):
            for j in range(S):
                colour = GONE if j < first else READ if j < end else "white"
                _cell(axes, j, i, f"{scores_TS[i, j]:g}" if first <= j < end else "", colour)
            shrink, *running = (float(x[i, 0]) for x in state)
            axes.text(S + 0.75, i + 0.5, f"× {shrink:g}", ha="center", va="center", fontsize=9,
                      color="black" if 0 < shrink < 1 else "#AAAAAA")
            for column, value in enumerate(running):
                _cell(axes, S + 1.5 + column * 1.2, i, f"{value:g}", CHANGED if 0 < shrink < 1 else "white", 1.2)
        for column, name in enumerate([*range(S), None, "m", "l", "O"]):
            at = column + 0.5 if column < S else S + 0.75 if name is None else S + 2.1 + (column - S - 1) * 1.2
            axes.text(at, -0.1, "shrink" if name is None else f"key {name}" if column < S else name, ha="center",
                      va="bottom", fontsize=9, color="#444444")
        for i in range(T):
            axes.text(-0.15, i + 0.5, f"query {i}", ha="right", va="center", fontsize=9, color="#444444")
        axes.set_title(f"after the tile of keys {first} to {end - 1}", fontsize=10)
        _bare(axes, S + 5.2, T + 0.1, left=-1.6, top=-0.6)
    patches = [Patch(color=READ, label="the tile of scores in memory"), Patch(color=GONE, label="gone"),
               Patch(color=CHANGED, label="a new maximum: the old l and O shrink")]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def plot_tiles(calls, T, size):
    """Draw which tiles of T queries by T keys are computed, one panel for each of `calls`, {name: options of an
    attention}: those that need a mask, those that do not, and those that are skipped. Returns a matplotlib Figure."""
    figure = _figure(calls, 2.4 * len(calls) + 0.2, 3.3)
    for axes, (name, options) in zip(figure.subplots(1, len(calls), squeeze=False)[0], calls.items(), strict=True):
        count = 0
        for queries, keys, masked in computed_tiles(T, size, **options):
            axes.add_patch(Rectangle((keys[0], queries[0]), keys[1] - keys[0], queries[1] - queries[0],
                                     facecolor=MASKED if masked else WHOLE, edgecolor="white", linewidth=0.8))
            count += 1
        axes.set_title(f"{name}: {count} tiles", fontsize=10)
        axes.set_xlabel("keys", fontsize=9)
        axes.add_patch(Rectangle((0, 0), T, T, fill=False, edgecolor="#888888", linewidth=0.8,
                                 clip_on=False))
        _bare(axes, T, T)
    figure.axes[0].set_ylabel("queries", fontsize=9)
    patches = [Patch(color=WHOLE, label="every pair counts"), Patch(color=MASKED, label="masked in part"),
               Patch(facecolor="white", edgecolor="#888888", label="left out")]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def computed_tiles(T, size, **options):
    """List the tiles that `tiled_attention` computes for T queries and keys, [(queries, keys, masked)]: spans (first,
    end), and whether some pair in them is masked. `options` as `attention_flops` takes them."""
    call, _ = resolve_shapes((1, 1, T, 1), (1, 1, T, 1), torch.float32, **options)
    found = []
    for queries, keys, band in call.sequences:
        for rows in tiles((band.fully_masked, band.T), size):
            for cols in tiles(band.keys_seen(rows), size):
                spans = (tuple(start + x for x in span) for (start, _), span in ((queries, rows), (keys, cols)))
                found.append((*spans, band.mask(rows, cols, "cpu") is not None))
    return found


def plot_roofs(hardware, intensities):
    """Draw the two roofs of a GPU as its maker publishes them, of its memory and of its matrix units, in FLOP/s over
    FLOPs a byte, both on log axes; and on the roof the most that each computation can reach.

    `hardware`: a `catalog.Hardware`; `intensities`: {name: FLOPs a byte}. Returns a matplotlib Figure. Williams,
    Waterman & Patterson 2009.
    """
    peak, bandwidth = hardware.bf16_flops, hardware.memory_bandwidth
    ridge = peak / bandwidth
    ends = (min([*intensities.values(), ridge]) / 4, max([*intensities.values(), ridge]) * 4)
    figure = _figure(intensities, 8.5, 4.4)
    axes = figure.subplots()
    axes.plot([ends[0], ridge, ends[1]], [ends[0] * bandwidth, peak, peak], color="#444444")
    axes.axvline(ridge, color="#BBBBBB", linewidth=0.8, linestyle=":")
    axes.text(ridge / 1.7, peak / 1.5, f"memory: {bandwidth / 1e12:g} TB/s", fontsize=8, ha="right")
    axes.text(ends[1] / 1.1, peak * 1.1, f"matrix units: {peak / 1e12:g} TFLOP/s", fontsize=8, ha="right")
    for colour, (name, intensity) in zip(COLOURS, intensities.items(), strict=False):
        roof = min(peak, intensity * bandwidth)
        axes.plot([intensity] * 2, [ends[0] * bandwidth, roof], color=colour, linewidth=0.8)
        axes.plot([intensity], [roof], "o", color=colour, markerfacecolor="white", markersize=7,
                  label=f"{name}: {intensity:,.0f} FLOPs a byte, at most {100 * roof / peak:.0f} % of the peak")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlim(*ends)
    axes.set_ylim(ends[0] * bandwidth, peak * 2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    ticks = [10**power * step for power in range(9, 16) for step in (1, 2, 5)]
    axes.set_yticks([y for y in ticks if ends[0] * bandwidth <= y <= peak * 2])
    axes.yaxis.set_major_formatter(lambda y, _: f"{y / 1e12:,g}")
    axes.tick_params(labelsize=8)
    axes.minorticks_off()
    axes.set_xlabel("FLOPs a byte", fontsize=9)
    axes.set_ylabel("TFLOP/s", fontsize=9)
    axes.set_title(hardware.name, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=2)
    return figure


def plot_roofline(rows):
    """Plot TFLOP/s over FLOPs a byte, of the rows of a recorded bench `attention`: one panel for each pass and
    head_dim, a point for each length; filled if every pair counts, hollow if causal. The line is what the chip reached
    in the same run: its rate of matrix products, and before the ridge its rate of memory. Returns a matplotlib Figure.

    Raises ValueError if the rows have no rates or no kernels in them: they were not taken on a GPU.
    """
    rates = {row["name"]: row["value"] for row in rows if row.get("name") in ("matrix rate", "memory rate")}
    points = [point for row in rows if "intensity" in row for point in _points(row)]
    if len(rates) < 2 or not points:
        raise ValueError(f"{len(rates)} rates and {len(points)} points: expected the rows of bench attention on a GPU")
    panels = sorted({(p["direction"], p["head_dim"]) for p in points}, key=lambda p: (p[0] == "backward", p[1]))
    names = list(dict.fromkeys([row["name"] for row in rows if "intensity" in row] + [p["name"] for p in points]))
    names = [name for name in names if any(p["name"] == name for p in points)]
    figure = _figure(names, 9.5, 3.3 * math.ceil(len(panels) / 2) + 0.5)
    grid = figure.subplots(math.ceil(len(panels) / 2), 2, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, panel in zip(grid, panels, strict=False):
        _roof(axes, rates, max(p["intensity"] for p in points))
        for colour, name in zip(ROOFLINE, names, strict=False):
            for causal in (False, True):
                line = sorted({(p["intensity"], p["value"]) for p in points
                               if ((p["direction"], p["head_dim"]), p["name"], p["causal"]) == (panel, name, causal)})
                axes.plot(*zip(*line, strict=True) if line else ([], []), "o-", color=colour, linewidth=0.8,
                          markersize=5, markerfacecolor="white" if causal else colour)
        axes.set_title(f"{panel[0]}, head_dim {panel[1]}", fontsize=10)
        axes.set_xlabel("FLOPs a byte (hollow: causal)", fontsize=9)
    for axes in grid[len(panels):]:
        axes.set_visible(False)
    patches = [Patch(color=colour, label=name) for colour, name in zip(ROOFLINE, names, strict=False)]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.supylabel("TFLOP/s", fontsize=9)
    return figure


def _points(row):
    """Yield what was measured in a row: our kernel, and the peer."""
    for name, value in ((row["name"], row["value"]), (row["peer"], row["peer_value"])):
        if value is not None:
            yield row | {"name": name, "value": value}


def _roof(axes, rates, most):
    """Draw the rates of the chip as a line, up to twice the largest intensity that is shown."""
    ridge = rates["matrix rate"] / rates["memory rate"]
    rising = [ridge * 2 ** (-i / 8) for i in range(32, -1, -1)]  # many points: one axis is logarithmic
    axes.plot([*rising, 2 * max(most, ridge)], [*(rates["memory rate"] * x for x in rising), rates["matrix rate"]],
              color="#444444", linewidth=1.2)
    axes.text(2 * max(most, ridge), rates["matrix rate"], f"{rates['matrix rate']:.0f} TFLOP/s ", ha="right",
              va="bottom", fontsize=8, color="#444444")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.12 * rates["matrix rate"])
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes.tick_params(labelsize=8)
    axes.grid(color="#EEEEEE")
    axes.spines[["top", "right"]].set_visible(False)


def _figure(labels, width, height):
    figure = MemoryFigure(figsize=(width, height), layout="constrained", facecolor="white")
    figure.labels = list(labels)
    return figure


def _cell(axes, x, y, text, colour, width=1):
    axes.add_patch(Rectangle((x, y), width, 1, facecolor=colour, edgecolor="#888888", linewidth=0.6))
    axes.text(x + width / 2, y + 0.5, text, ha="center", va="center", fontsize=9)


def _bare(axes, right, bottom, left=0, top=0):
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
