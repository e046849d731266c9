"""A map of an allocator's memory over time: addresses upward, events to the right, blocks in their category's colour.

What is white within a segment is reserved and free: external fragmentation.
"""

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.patches import Patch

from ..common.figure import UNITS, MemoryFigure, colour
from .snapshot import SEGMENT_EVENTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FREE = "#EDEDED"


def segment_map(**snapshots: Any) -> "Figure":
    """Draw snapshots side by side, each with its label: `segment_map(default=record(trace), other=record(…))`.

    A recording is drawn from its own beginning. Segments stand above each other in the order in which they were asked
    for; addresses that never have memory take no room. A red line is a request that failed. Returns a matplotlib
    Figure. ValueError without a snapshot, or for one without events.
    """
    if not snapshots or not all(snapshot.entries for snapshot in snapshots.values()):
        raise ValueError("segment_map needs snapshots with events: segment_map(default=record(trace))")
    drawn = {label: _SegmentBoxes(snapshot) for label, snapshot in snapshots.items()}
    highest = max(rows.height for rows in drawn.values())
    divisor, unit = next((size, name) for size, name in UNITS if highest >= size)
    figure = MemoryFigure(figsize=(max(8.5, 5 * len(drawn)), 4.2), layout="constrained", facecolor="white")
    figure.labels = list(drawn)
    columns = figure.subplots(1, len(drawn), squeeze=False, sharey=True)[0]
    for axes, (label, rows) in zip(columns, drawn.items(), strict=True):
        _fill(axes, rows.segments, FREE, divisor)
        for name, boxes in rows.blocks.items():
            _fill(axes, boxes, colour(name), divisor)
        for event in rows.failures:
            axes.axvline(event, color="#D00000", linewidth=1)
        axes.set_title(label.replace("_", " "), fontsize=10, loc="left")
        axes.set_xlim(0, rows.events)
        axes.set_ylim(0, 1.02 * highest / divisor)
        axes.set_xlabel("events", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    columns[0].set_ylabel(f"address, {unit}", fontsize=9)
    names = sorted({name for rows in drawn.values() for name in rows.blocks})
    patches = [Patch(color=colour(name), label=name or "live") for name in names] + [Patch(color=FREE, label="free")]
    if any(rows.failures for rows in drawn.values()):
        patches.append(Patch(color="#D00000", label="out of memory"))
    figure.legend(handles=patches, loc="outside lower center", ncols=8, frameon=False, fontsize=8)
    return figure


class _SegmentBoxes:
    """Boxes (first event, last event, bottom, top): `segments`, and `blocks` by category. `failures`: events."""

    def __init__(self, snapshot):
        self.blocks, self.segments, self.failures, self.height = {}, [], [], 0
        self.events, self._bottoms, self._places = len(snapshot.entries), {}, []  # address → (bottom, bytes); sorted
        open_segments, open_blocks = {}, {}
        for i, entry in enumerate(snapshot.entries):
            action, at, size = entry["action"], entry.get("addr"), entry["size"]
            if SEGMENT_EVENTS.get(action) == 1:
                self._place(at, size)
                open_segments[at] = i, size
            elif SEGMENT_EVENTS.get(action) == -1:
                self._close_segments(open_segments, at, size, i)
            elif action == "alloc":
                frames = entry.get("frames") or [{"filename": ""}]
                open_blocks[at] = i, size, frames[0]["filename"]
            elif action == "free_completed" and at in open_blocks:
                self._block(at, *open_blocks.pop(at), i)
            elif action == "oom":
                self.failures.append(i)
        for at, block in open_blocks.items():
            self._block(at, *block, self.events)
        for at, (begun, size) in open_segments.items():
            self._segment(at, size, begun, self.events)

    def _place(self, at, size):
        """Give new addresses a place above all others."""
        if self._bottom(at) is None:
            self._bottoms[at] = self.height, size
            self._places = sorted(self._bottoms)
            self.height += size

    def _bottom(self, address):
        i = bisect_right(self._places, address) - 1
        if i >= 0:
            bottom, size = self._bottoms[self._places[i]]
            if address < self._places[i] + size:
                return bottom + address - self._places[i]
        return None

    def _close_segments(self, open_segments, at, size, event):
        """End what is mapped at these addresses: pieces may have come one by one, and go together, or in part."""
        for first in [a for a, (_, length) in open_segments.items() if a < at + size and at < a + length]:
            begun, length = open_segments.pop(first)
            self._segment(first, length, begun, event)
            for a, b in ((first, at), (at + size, first + length)):
                if a < b:
                    open_segments[a] = event, b - a

    def _segment(self, at, size, begun, ended):
        self.segments.append((begun, ended, self._bottom(at), self._bottom(at) + size))

    def _block(self, at, begun, size, name, ended):
        while size > 0 and (bottom := self._bottom(at)) is not None:  # over pieces that stand apart
            i = bisect_right(self._places, at) - 1
            room = min(size, self._places[i] + self._bottoms[self._places[i]][1] - at)
            self.blocks.setdefault(name, []).append((begun, ended, bottom, bottom + room))
            at, size = at + room, size - room


def _fill(axes, boxes, face, divisor):
    """Draw boxes as one collection."""
    corners = np.array([((a, low), (b, low), (b, high), (a, high)) for a, b, low, high in boxes], dtype=float)
    if len(corners):
        corners[..., 1] /= divisor
        axes.add_collection(PolyCollection(corners, facecolors=face, edgecolors="white", linewidths=0.2), autolim=False)
