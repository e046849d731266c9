"""The figure of time against peak shows the staircase and every point."""

from refimpl.checkpointing import costs, plan_peak, plan_time
from refimpl.checkpointing.figure import plot_time_peak
from refimpl.checkpointing.schedule import Program


def test_every_point_is_drawn_at_its_place():
    chain = costs([1] * 6, [2**20] * 6, [2**18] * 6)
    plans = {"full": [(i,) for i in range(5)] + [5], "none": list(range(6))}
    points = {name: (plan_peak(chain, plan), plan_time(chain, plan)) for name, plan in plans.items()}
    figure = plot_time_peak(Program(chain).curve(), {**points, "also none": points["none"]})
    (axes,) = figure.axes
    assert {text.get_text() for text in axes.texts} >= {"full", "none, also none"}
    last = [line for line in axes.lines if line.get_marker() not in (".", "None")]
    assert [(line.get_xdata()[0] * 2**20, line.get_ydata()[0] * 18) for line in last] == list(points.values())
    assert figure._repr_png_()[:4] == b"\x89PNG"


def test_as_many_points_as_anybody_has():
    """There are eight markers: the ninth point has the first's again."""
    points = {str(i): (2**20 * i, i) for i in range(1, 20)}
    (axes,) = plot_time_peak([(2**20, 2), (2**21, 1)], points).axes
    (stairs,) = [line for line in axes.lines if line.get_label() == "optimal schedule"]
    assert list(stairs.get_ydata()) == [2, 1, 1], "with more bytes it stays as fast as where all is kept"
    markers = [line.get_marker() for line in axes.lines if line.get_marker() not in (".", "None")]
    assert len(set(markers)) == 8 and markers == [*markers[:8], *markers[:8], *markers[:3]]
