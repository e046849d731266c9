"""The figure of losses shows every curve it is given."""

import pytest

from refimpl.activations.figure import plot_losses


def test_every_curve_is_there_and_named():
    curves = {"uncompressed": [3.0, 2.0, 1.0], "int8": [3.0, 2.1, 1.1]}
    figure = plot_losses(curves, each=10)
    above, below = figure.axes
    assert {line.get_label(): list(line.get_ydata()) for line in above.lines} == curves
    assert list(above.lines[0].get_xdata()) == [5, 15, 25]
    assert list(below.lines[1].get_ydata()) == pytest.approx([0, 0.1, 0.1]) and not any(below.lines[0].get_ydata())
    assert figure._repr_png_().startswith(b"\x89PNG") and repr(figure) == "<memory figure: uncompressed, int8>"


def test_nothing_to_draw():
    with pytest.raises(ValueError, match="plot_losses needs at least one curve"):
        plot_losses({})
