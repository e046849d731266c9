"""Draws a Gantt chart of one rank's step: spans as bars in lanes, over the bytes of the same time."""

from matplotlib.patches import Patch

from .figure import UNITS, MemoryFigure, _readable_on, colour, stack

PALETTE = ("#35618F", "#8A5A2B", "#5B7F3A", "#6FA8DC", "#D9A06B", "#9A6FB0", "#B04A5A", "#2F8F83",
           "#C9B037")  # not those of categories
WAITING = "#333333"


def gantt(spans, trace=None, lanes=None):
    """Draw spans (`spans.Span`) as bars, a row for each lane and a colour for each kind; time spent waiting is dark.
    Beneath, draw the bytes of `trace` (what `memory.track` gave) by category on the same axis of time. Returns a
    matplotlib Figure.

    `lanes`: which to draw, from the top; by default all, in the order in which they appear. ValueError if no span is in
    them.
    """
    lanes = list(dict.fromkeys(span.lane for span in spans)) if lanes is None else list(lanes)
    shown = [span for span in spans if span.lane in lanes]
    if not shown:
        raise ValueError(f"nothing to draw in lanes {lanes}: {len(spans)} spans were given")
    start = min(span.begin for span in shown)
    kinds = list(dict.fromkeys(span.kind for lane in lanes for span in shown if span.lane == lane))
    colours = {kind: PALETTE[i % len(PALETTE)] for i, kind in enumerate(kinds)}
    figure = MemoryFigure(figsize=(9.5, 0.8 + 0.45 * len(lanes) + (2.4 if trace is not None else 0)),
                          layout="constrained", facecolor="white")
    figure.labels = lanes
    ratios = [0.45 * len(lanes) + 0.2] + [2.4] * (trace is not None)
    axes = figure.subplots(len(ratios), 1, squeeze=False, sharex=True, height_ratios=ratios)[:, 0]
    draw_lanes(axes[0], shown, lanes, colours, start)
    patches = [Patch(color=colours[kind], label=kind) for kind in kinds]
    patches += [Patch(color=WAITING, label="waiting")] * any(span.waited for span in shown)
    if trace is not None:
        held = [Patch(color=colour(name), label=name) for name in draw_bytes(axes[1], trace, start)]
        figure.legend(handles=held, loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    axes[-1].set_xlabel("ms", fontsize=9)
    axes[-1].set_xlim(0, (max(span.end for span in shown) - start) / 1e6)
    figure.legend(handles=patches, loc="outside upper center", ncols=7, frameon=False, fontsize=8)
    return figure


def draw_lanes(axes, spans, lanes, colours, start):
    """Draw a bar for each span, one below the other where they overlap, with its name where there is room."""
    inches = 8.5 / (max(span.end for span in spans) - start)
    for row, lane in enumerate(lanes):
        tracks = tracks_of([span for span in spans if span.lane == lane])
        height = 0.84 / len(tracks)
        for i, track in enumerate(tracks):
            y = row - 0.42 + (i + 0.5) * height
            for span in track:
                busy = span.end - span.waited - span.begin
                axes.barh(y, busy / 1e6, left=(span.begin - start) / 1e6, height=height, color=colours[span.kind],
                          edgecolor="white", linewidth=0.4)
                axes.barh(y, span.waited / 1e6, left=(span.begin + busy - start) / 1e6, height=height, color=WAITING,
                          edgecolor="white", linewidth=0.4)
                begin, length, ground = max((span.begin, busy, colours[span.kind]),
                                            (span.begin + busy, span.waited, WAITING), key=lambda part: part[1])
                if length * inches > 0.05 + 0.06 * len(span.name) and len(tracks) < 4:
                    axes.text((begin - start + length / 2) / 1e6, y, span.name, ha="center", va="center", fontsize=7,
                              color=_readable_on(ground))
    axes.set_yticks(range(len(lanes)), lanes, fontsize=9)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)


def tracks_of(spans):
    """Return the fewest lists of spans such that no two spans of a list overlap."""
    tracks = []
    for span in sorted(spans, key=lambda span: span.begin):
        free = next((track for track in tracks if track[-1].end <= span.begin), None)
        if free is None:
            tracks.append(free := [])
        free.append(span)
    return tracks or [[]]


def draw_bytes(axes, trace, start):
    """Draw bytes by category against time, stacked; return the categories that had any."""
    timeline = trace.timeline
    x = [(op.time_ns - start) / 1e6 for op in timeline.ops]
    divisor, unit = next((size, name) for size, name in UNITS if max(timeline.totals.max(), 1) >= size)
    seen = stack(axes, x, timeline, divisor)
    axes.set_ylim(0)
    axes.set_ylabel(unit, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return seen
