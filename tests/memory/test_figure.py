"""The figure draws the numbers it is given."""

import pytest
import torch
from matplotlib.colors import to_hex

from refimpl import memory
from refimpl.memory.figure import COLOURS, phases


@pytest.fixture
def trace(trained):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    return t


def bar_bytes(axes):
    """{colour: width} of the bars."""
    return {to_hex(bar.get_facecolor()).upper(): bar.get_width() for bar in axes.patches}


def test_bars_are_the_ledgers_and_the_peak_is_marked(trace):
    predicted = memory.Ledger(parameters=trace.peak["parameters"], activations=3 * 2**10)
    figure = trace.plot(predicted=predicted)
    bars, line = figure.axes
    widths = sorted(bar.get_width() for bar in bars.patches)
    scale = trace.peak.total / max(trace.peak.total, 1)
    divisor = trace.peak["parameters"] / bar_bytes(bars)[COLOURS["parameters"]] * scale
    assert widths == sorted(v / divisor for v in [*trace.peak.values(), *predicted.values()])
    assert [label.get_text() for label in bars.get_yticklabels()] == ["predicted", "measured"]
    peak = trace.peak_moment()
    assert line.lines[-1].get_xdata()[0] == peak.index
    assert line.lines[-1].get_ydata()[0] == pytest.approx(peak.ledger.total / divisor)
    assert memory.human(peak.ledger.total) in line.texts[-1].get_text()
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["parameters", "optimizer state", "gradients", "inputs", "activations", "temporaries"]


def test_several_runs_stand_side_by_side_on_one_scale(trace):
    with memory.track() as small:
        torch.zeros(100)
    figure = memory.plot(large=trace, small_one=small, predicted={"large": trace.peak})
    assert [axes.get_title(loc="left") for axes in figure.axes[:2]] == ["large", "small one"]
    assert figure.axes[2].get_ylim() == figure.axes[3].get_ylim()
    assert len(figure.axes[1].get_yticklabels()) == 1
    assert [axes.get_title(loc="left") for axes in memory.plot(small, small).axes[:2]] == ["run 0", "run 1"]


def test_it_shows_itself_as_a_picture(trace):
    figure = trace.plot()
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert repr(figure) == "<memory figure: measured>"


def test_phases_are_runs_of_rows(trace):
    found = phases(trace.timeline)
    assert [phase for phase, _, _ in found] == ["forward", "backward", "step"]
    assert found[0][1] == 0 and found[-1][2] == len(trace.timeline) - 1


def test_nothing_to_draw_is_an_error(trace):
    with pytest.raises(ValueError, match="at least one trace"):
        memory.plot()
    with pytest.raises(ValueError, match=r"predicted for \['lage'\]: the columns are \['large'\]"):
        memory.plot(large=trace, predicted={"lage": trace.peak})


def test_an_empty_trace_can_be_drawn():
    with memory.track() as t:
        pass
    assert t.plot()._repr_png_().startswith(b"\x89PNG")
