"""The segment map: every block and segment has its bytes and its time, and nothing overlaps."""

import itertools

import pytest
from allocator_kit import random_trace

from refimpl.allocator import Snapshot, record, segment_map
from refimpl.allocator.drawing import _SegmentBoxes
from refimpl.allocator.snapshot import SEGMENT_EVENTS


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_boxes_have_the_bytes_of_each_event(settings):
    snapshot = record(random_trace(400, streams=2), settings=settings, capacity=400 * 2**20)
    drawn, reserved, live = _SegmentBoxes(snapshot), 0, {}
    for i, entry in enumerate(snapshot.entries):
        reserved += entry["size"] * SEGMENT_EVENTS.get(entry["action"], 0)
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            del live[entry["addr"]]
        boxes = [box for boxes in drawn.blocks.values() for box in boxes]
        assert within(drawn.segments, i) == reserved and within(boxes, i) == sum(live.values())
    assert apart(drawn.segments) and apart(boxes)
    assert drawn.failures == [i for i, entry in enumerate(snapshot.entries) if entry["action"] == "oom"] != []


def within(boxes, event):
    """The bytes of boxes that are there after an event."""
    return sum(top - bottom for begun, ended, bottom, top in boxes if begun <= event < ended)


def apart(boxes):
    """Whether no two boxes share an address at one time."""
    return all(begun >= ended or low >= top or high <= bottom
               for (_, ended, bottom, top), (begun, _, low, high) in itertools.combinations(sorted(boxes), 2))


def test_a_map_of_two():
    snapshots = {text or "default": record(random_trace(50), settings=text) for text in ("", "max_split_size_mb:32")}
    figure = segment_map(**snapshots)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["default", "max split size mb:32"]
    assert figure._repr_png_().startswith(b"\x89PNG")
    for nothing in ({}, {"a": Snapshot([], [])}):
        with pytest.raises(ValueError, match="segment_map needs snapshots with events"):
            segment_map(**nothing)
