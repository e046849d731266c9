"""The Gantt chart draws the spans it is given, each in its lane and time, over the bytes of the same time."""

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from refimpl import memory
from refimpl.common.figure import COLOURS
from refimpl.common.gantt import PALETTE, WAITING, draw_bytes, gantt, tracks_of
from refimpl.common.spans import Span
from refimpl.memory.trace import Op, StorageRecord, Trace

MS = 10**6
START = 1_700_000_000 * 10**9  # ns since 1970
SPANS = [
    Span("compute", "forward", "blocks.0", START, START + 40 * MS),
    Span("gather", "all_gather", "blocks.1", START + 10 * MS, START + 60 * MS, 100, waited=20 * MS),
    Span("gather", "all_gather", "blocks.2", START + 20 * MS, START + 50 * MS, 100),
    Span("compute", "backward", "blocks.0", START + 60 * MS, START + 100 * MS),
    Span("other", "all_reduce", "", START, START + 500 * MS)]


def bars(axes):
    """(row, first ms, last ms, colour) of each bar with a length; the row is that of the lane that it is in."""
    return [(round(bar.get_y() + bar.get_height() / 2), round(bar.get_x(), 6), round(bar.get_x() + bar.get_width(), 6),
             to_hex(bar.get_facecolor()).upper()) for bar in axes.patches if bar.get_width()]


def test_bars_are_the_spans_and_what_was_waited_for_is_dark_at_their_end():
    figure = gantt(SPANS, lanes=["compute", "gather"])
    lanes, = figure.axes
    forward, backward, gather = PALETTE[:3]  # in the order of lanes, whatever came first
    assert sorted(bars(lanes)) == sorted([
        (0, 0, 40, forward), (0, 60, 100, backward), (1, 10, 40, gather), (1, 40, 60, WAITING), (1, 20, 50, gather)])
    assert lanes.get_xlim() == (0, 100)  # not the 500 of a lane that is not asked for
    assert [label.get_text() for label in lanes.get_yticklabels()] == ["compute", "gather"]
    assert lanes.get_ylim() == (1.5, -0.5), "the first is at the top, and each has as much room"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["forward", "backward", "all_gather", "waiting"]
    shown = [to_hex(patch.get_facecolor()).upper() for patch in legend.get_patches()]
    assert shown == [forward, backward, gather, WAITING]
    assert figure._repr_png_()[:4] == b"\x89PNG" and repr(figure) == "<memory figure: compute, gather>"


def test_by_default_all_lanes_and_no_word_of_waiting_where_nobody_did():
    figure = gantt([span._replace(waited=0) for span in SPANS])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["compute", "gather", "other"]
    assert "waiting" not in [text.get_text() for text in figure.legends[0].get_texts()]
    assert figure.axes[0].get_xlim() == (0, 500)


def test_names_stand_where_there_is_room_and_on_the_longer_part():
    (name,) = gantt([Span("gather", "all_gather", "blocks.1", START, START + 100 * MS, waited=90 * MS),
                     Span("compute", "forward", "blocks.0", START, START + 2 * MS)]).axes[0].texts
    assert name.get_text() == "blocks.1" and name.get_position()[0] == pytest.approx(55) and name.get_color() == "white"


def test_spans_of_a_lane_that_overlap_lie_below_each_other():
    gathers = [span for span in SPANS if span.lane == "gather"]
    assert tracks_of(gathers) == [[gathers[0]], [gathers[1]]]
    ones = [Span("x", "k", "", begin, begin + 10) for begin in (20, 0, 10, 5)]
    assert [[span.begin for span in track] for track in tracks_of(ones)] == [[0, 10, 20], [5]]
    assert tracks_of([]) == [[]]
    upper, lower = (bar for bar in gantt(gathers).axes[0].patches if bar.get_width() in (30, pytest.approx(30)))
    assert upper.get_y() + upper.get_height() <= lower.get_y() + 1e-9


@pytest.mark.parametrize("lanes", [None, ["compute"]])
def test_nothing_to_draw(lanes):
    given = [] if lanes is None else SPANS[1:3]
    with pytest.raises(ValueError, match=f"nothing to draw in lanes .*: {len(given)} spans were given"):
        gantt(given, lanes=lanes)


def test_bytes_are_on_the_same_axis_of_time():
    model = torch.nn.Linear(64, 64, bias=False)
    with memory.track(model) as t:
        y = model(torch.ones(256, 64, requires_grad=True))
    op = next(op for op in t.timeline.ops if op.name in ("mm", "linear"))
    before = Span("compute", "wait", "", op.time_ns - 7 * MS, op.time_ns + 3 * MS)  # the product: 7 of its 10 ms
    figure = gantt([before], t)
    lanes, held = figure.axes
    assert lanes.get_xlim() == held.get_xlim() == (0, 10)
    areas = {to_hex(area.get_facecolor()[0]).upper(): area.get_paths()[0].vertices for area in held.collections}
    assert set(areas) >= {COLOURS["parameters"]}
    top = max(vertices[:, 1].max() for vertices in areas.values())
    assert top == pytest.approx(t.timeline.totals.max() / 2**10) and held.get_ylabel() == "KiB"
    at = {round(float(x), 3) for vertices in areas.values() for x, _ in vertices}
    assert 7.0 in at and "parameters" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert y.shape == (256, 64)


def test_bytes_are_in_the_largest_unit_of_which_there_is_one():
    for nbytes, unit in ((2**10 - 1, "bytes"), (2**10, "KiB"), (2**20 - 1, "KiB"), (2**20, "MiB")):
        record = StorageRecord("cpu", "load", "forward", "", -1, nbytes, roles={"parameters"})
        t = Trace([Op("load", "forward", "", START)], [record], [(-1, 0, nbytes)], first_call=0)
        assert gantt(SPANS, t).axes[1].get_ylabel() == unit


def test_a_kib_of_bytes_is_one_kib():
    """The least of them, drawn alone, so that it is read on every push."""
    record = StorageRecord("cpu", "load", "forward", "", -1, 2**10, roles={"parameters"})
    trace = Trace([Op("load", "forward", "", START)], [record], [(-1, 0, 2**10)], first_call=0)
    axes = Figure().subplots()
    draw_bytes(axes, trace, START)
    assert axes.get_ylabel() == "KiB"
