"""The figure draws the numbers it is given."""

import itertools

import pytest
import torch
from matplotlib.colors import to_hex, to_rgb

from refimpl import memory
from refimpl.common.figure import COLOURS, _readable_on, colour, phases
from refimpl.memory.trace import Op, StorageRecord, Trace


@pytest.fixture
def by_hand():
    """2 KiB of parameters throughout; 4 KiB that the second operation made, gone after the third."""
    ops = [Op("load", "forward", "", 0), Op("mm", "forward", "net", 0), Op("mm", "backward", "net", 0),
           Op("add", "step", "", 0)]
    records = [StorageRecord("cpu", "load", "forward", "", -1, 2048, roles={"parameters"}),
               StorageRecord("cpu", "mm", "forward", "net", 1, 4096, saved=True, alive=False)]
    return Trace(ops, records, [(-1, 0, 2048), (1, 1, 4096), (3, 1, -4096)], first_call=0)


def widths(axes):
    return [bar.get_width() for bar in axes.patches]


def said(texts):
    return [text.get_text() for text in texts]


def test_bars_are_the_ledgers_and_the_peak_is_marked(trace):
    predicted = memory.Ledger(parameters=trace.peak["parameters"], activations=3 * 2**10)
    figure = trace.plot(predicted=predicted)
    bars, line = figure.axes
    by_colour = {to_hex(bar.get_facecolor()).upper(): bar.get_width() for bar in bars.patches}
    divisor = trace.peak["parameters"] / by_colour[COLOURS["parameters"]]
    assert sorted(widths(bars)) == sorted(v / divisor for v in [*trace.peak.values(), *predicted.values()])
    for row in (0, 1):  # end to end, in the order of the categories
        parts = [bar for bar in bars.patches if round(bar.get_y() + 0.35) == row]
        ends = [0, *itertools.accumulate(bar.get_width() for bar in parts)]
        assert [bar.get_x() for bar in parts] == pytest.approx(ends[:-1]) and len(parts) >= 2
        shown = [to_hex(bar.get_facecolor()).upper() for bar in parts]
        assert shown == sorted(shown, key=list(COLOURS.values()).index)
    assert said(bars.get_yticklabels()) == ["predicted", "measured"]
    peak, mark = trace.peak_moment(), line.lines[-1]
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (peak.index, pytest.approx(peak.ledger.total / divisor))
    assert memory.human(peak.ledger.total) in line.texts[-1].get_text()
    assert said(figure.legends[0].get_texts()) == [
        "parameters", "optimizer state", "gradients", "inputs", "activations", "temporaries"]


def test_several_runs_stand_side_by_side_on_one_scale(trace):
    with memory.track() as small:
        torch.zeros(100)
    figure = memory.plot(large=trace, small_one=small, predicted={"large": trace.peak})
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == ["large", "small one"]
    assert figure.axes[2].get_ylim() == figure.axes[3].get_ylim()
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    assert [axes.get_ylabel() for axes in figure.axes[2:]] == ["KiB", ""]
    assert [axes.lines[-1].get_ydata()[0] for axes in figure.axes[2:]] == [trace.peak.total / 1024, 400 / 1024]
    # Measured stands beside measured, as thick, whether a prediction is above it or not.
    assert said(figure.axes[1].get_yticklabels()) == ["measured"]
    assert figure.axes[1].get_yticks().tolist() == [1] and figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert figure.axes[1].patches[0].get_y() == figure.axes[0].patches[-1].get_y()
    for figure, titles in ((memory.plot(small, small), ["run 0", "run 1"]),
                           (memory.plot(small, b=small), ["measured", "b"])):
        assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == titles


def test_bytes_are_written_where_there_is_room(trace):
    figure = trace.plot(predicted={"parameters": 150 * 2**10, "inputs": 10, "of its own": 170 * 2**10})
    figure.draw_without_rendering()
    bars = figure.axes[0]
    written = {(round(text.get_position()[1]), text.get_text()): text for text in bars.texts}
    expected = {(0, "150.0 KiB"), (0, "170.0 KiB"), (0, "320.0 KiB"), (1, memory.human(trace.peak.total))}
    assert expected <= set(written) and (0, "10 B") not in written
    inside = [text for (row, what), text in written.items() if what in ("150.0 KiB", "170.0 KiB")]
    for text, bar in zip(inside, [bars.patches[0], bars.patches[2]], strict=True):
        box, part = text.get_window_extent(), bar.get_window_extent()
        assert part.x0 < box.x0 and box.x1 < part.x1 and part.y0 < box.y0 and box.y1 < part.y1
    assert to_hex(bars.patches[2].get_facecolor()) == "#7f7f7f"  # of no known category
    totals = [text for (row, what), text in written.items() if what == "320.0 KiB"]
    assert totals[0].get_window_extent().x0 > bars.patches[2].get_window_extent().x1


def test_letters_can_be_read_on_every_colour():
    """Contrast after WCAG 2.1: the better of black and white, or at least 3 : 1."""
    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    for background in [*COLOURS.values(), colour("of its own")]:
        high, low = sorted((luminance(background), luminance(_readable_on(background))), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, background
    assert len(set(COLOURS.values())) == len(memory.CATEGORIES)


def test_a_prediction_may_be_a_dict_or_a_trace(trace):
    given = {"parameters": 3 * 2**20, "optimizer_state": 2**20}
    for predicted in (given, memory.Ledger(given), {"measured": given}):
        assert widths(trace.plot(predicted=predicted).axes[0])[:2] == [3, 1]
    for predicted in (trace, {"measured": trace}):
        bars = widths(trace.plot(predicted=predicted).axes[0])
        assert bars[: len(bars) // 2] == bars[len(bars) // 2 :]
    for nothing in (None, {}, memory.Ledger(), {"measured": {}}):
        bars = trace.plot(predicted=nothing).axes[0]
        assert len(bars.get_yticklabels()) == 1 and bars.get_ylim() == (0.5, -0.5)  # and no room left for a second
    assert [len(axes.get_yticklabels()) for axes in memory.plot(a=trace, b=trace, predicted=given).axes[:2]] == [2, 2]


def test_it_shows_itself_as_a_picture(trace):
    figure = trace.plot()
    assert figure._repr_png_().startswith(b"\x89PNG") and repr(figure) == "<memory figure: measured>"


def test_phases_are_runs_of_rows(trace):
    found = phases(trace.timeline)
    assert [phase for phase, _, _ in found] == ["forward", "backward", "step"]
    assert found[0][1] == 0 and found[-1][2] == len(trace.timeline) - 1


def test_nothing_to_draw_is_an_error(trace):
    with pytest.raises(ValueError, match="at least one trace"):
        memory.plot()
    with pytest.raises(ValueError, match=r"predicted for \['lage'\]: the columns are \['large'\]"):
        memory.plot(large=trace, predicted={"lage": trace.peak})
    with pytest.raises(ValueError, match="two traces are called 'measured'"):
        memory.plot(trace, measured=trace)
    with pytest.raises(ValueError, match="category 'params': is it 'parameters'"):
        trace.plot(predicted={"params": 8})
    with pytest.raises(TypeError, match="predicted=5: expected a Ledger, or a dict of Ledgers by column"):
        trace.plot(predicted=5)
    with pytest.raises(TypeError, match="predicted for 'after' is 5: expected a Ledger"):
        memory.plot(before=trace, after=trace, predicted={"after": 5})
    with pytest.raises(TypeError, match="plot: after is a Ledger, expected what memory.track"):
        memory.plot(before=trace, after=trace.peak)


def test_an_empty_trace_can_be_drawn():
    with memory.track() as t:
        pass
    assert t.plot()._repr_png_().startswith(b"\x89PNG")


def test_the_timeline_is_the_numbers_in_their_colours(by_hand):
    line = by_hand.plot().axes[1]
    areas = {to_hex(area.get_facecolor()[0]).upper(): area.get_datalim(line.transData) for area in line.collections}
    assert {name: (areas[COLOURS[name]].y0, areas[COLOURS[name]].y1) for name in ("parameters", "activations")} == {
        "parameters": (0, 2), "activations": (2, 6)}
    assert len(areas) == 2 and line.get_ylabel() == "KiB"
    high = [x for x, y in line.collections[1].get_paths()[0].vertices if y == 6]
    assert (min(high), max(high)) == (2, 4)  # from the operation that took it to the one that gave it back
    assert (line.get_xlim(), line.get_ylim()) == ((0, 5), (0, 1.25 * 6))
    mark = line.lines[-1]
    assert (mark.get_xdata().tolist(), mark.get_ydata().tolist()) == ([2], [6])
    assert said(line.texts) == ["forward", "step", "6.0 KiB\nmm, net"]
    assert [text.get_position()[0] for text in line.texts[:2]] == [1, 4.5]
    assert [border.get_xdata()[0] for border in line.lines[:-1]] == [0, 3, 4] and line.texts[-1].get_ha() == "left"


def test_the_peaks_words_stay_inside_the_axes(by_hand):
    ops = [by_hand.ops[2]._replace(phase="forward", module="")] * 4
    text = Trace(ops, by_hand.records[:1], [(3, 0, 2048)], first_call=0).plot().axes[1].texts[-1]
    assert (text.get_ha(), text.get_text()) == ("right", "2.0 KiB\nmm")


@pytest.mark.parametrize(("nbytes", "unit", "width"), [
    (100, "bytes", 100), (1023, "bytes", 1023), (1024, "KiB", 1), (3 * 2**20, "MiB", 3), (5 * 2**30, "GiB", 5),
    (7 * 2**40, "TiB", 7)])
def test_the_unit_is_the_largest_that_fits(nbytes, unit, width):
    figure = Trace([], [StorageRecord("cpu", "(start)", "forward", "", -1, nbytes)], [(-1, 0, nbytes)]).plot()
    assert figure.axes[1].get_ylabel() == unit and figure.axes[0].patches[0].get_width() == width


def test_phases_that_are_short_have_no_name():
    ops = [Op("a", "forward", "", 0)] * 60 + [Op("b", "backward", "", 0)] * 2 + [Op("c", "step", "", 0)] * 60
    trace = Trace(ops, first_call=0)
    assert phases(trace.timeline) == [("forward", 0, 60), ("backward", 61, 62), ("step", 63, 123)]
    assert said(trace.plot().axes[1].texts[:-1]) == ["forward", "step"]


def test_borders_of_phases_do_not_hatch_the_picture():
    """An optimizer that steps bucket by bucket, with other operations in between."""
    ops = [Op("a", "forward", "", 0)] * 300 + [Op("b", phase, "", 0) for phase in ("step", "forward")] * 50
    trace = Trace([*ops, *[Op("c", "step", "", 0)] * 300], first_call=0)
    borders = [line.get_xdata()[0] for line in trace.plot().axes[1].lines[:-1]]
    assert len(phases(trace.timeline)) == 102 and borders == [0, 301, 401]


@pytest.mark.parametrize(("columns", "shown"), [(1, 5), (3, 1)])
def test_names_of_phases_stand_where_they_have_room(columns, shown):
    ops = [Op("mm", phase, "", 0) for _ in range(4) for phase in ["forward"] * 10 + ["backward"] * 16]
    trace = Trace(ops + [Op("mul", "step", "", 0)] * 60, first_call=0)
    figure = memory.plot(**{f"run {i}": trace for i in range(columns)})
    figure._repr_png_()
    axes = figure.axes[-1]
    boxes = sorted([text.get_window_extent() for text in axes.texts
                    if text.get_text() in ("forward", "backward", "step")], key=lambda box: box.x0)
    assert len(boxes) == shown and all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


@pytest.mark.parametrize("row", [0, 45, 49, 51, 55, 99])
def test_a_long_name_at_the_peak_stays_beside_the_axis_numbers(by_hand, row):
    """Also when the peak is just right of the middle, in the narrower of two columns."""
    ops = [Op("_softmax_backward_data", "forward", "blocks.3.attention", 0)] * 100
    trace = Trace(ops, by_hand.records[:1], [(row, 0, 2048)] + [(row + 1, 0, -2048)] * (row < 99), first_call=0)
    figure = memory.plot(a=trace, b=trace)
    figure._repr_png_()
    for axes in figure.axes[2:]:
        words, box = axes.texts[-1].get_window_extent(), axes.get_window_extent()
        assert box.x0 <= words.x0 and words.x1 <= box.x1


def test_what_the_figures_leave_out_stands_above_them(by_hand):
    assert by_hand.plot().get_suptitle() == ""
    by_hand.notes += ["a note of more words than one line has " * 5, "another", "another"]
    above = by_hand.plot().get_suptitle()
    assert above.count("a note of") == 5 and above.split("\n")[-1] == "another" and above.count("another") == 1
