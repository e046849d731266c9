"""The picture shows the numbers, and whose they are."""

import pytest
from matplotlib.colors import to_hex

from refimpl.comm.drawing import COLOURS, COMPLETE, PARTIAL, colour, draw

draw({"first": [[1]]})._repr_png_()  # matplotlib opens its fonts once, and keeps them open


@pytest.mark.parametrize(("value", "expected"), [
    (3, COLOURS[0]), (3000, COLOURS[3]), (1111, COMPLETE), (110, PARTIAL), (1011, PARTIAL)])
def test_a_colour_says_who_is_in_a_number(value, expected):
    assert colour(value, world_size=4) == expected


def test_each_rank_is_a_row_and_each_chunk_a_cell():
    figure = draw({"before": [[1, 2], [10, 20]], "reduced": [[11], [22]]})
    before, reduced = figure.axes[:2]
    assert [to_hex(cell.get_facecolor()).upper() for cell in before.patches] == [COLOURS[0]] * 2 + [COLOURS[1]] * 2
    assert [text.get_text() for text in before.texts] == ["rank 0", "1", "2", "rank 1", "10", "20"]
    assert len(reduced.patches) == 2 and reduced.get_title() == "reduced"
    assert figure._repr_png_().startswith(b"\x89PNG") and repr(figure) == "<memory figure: before, reduced>"


def test_seven_panels_take_three_rows():
    assert len(draw({str(i): [[1]] for i in range(7)}).axes) == 9
    with pytest.raises(ValueError, match="at least one panel"):
        draw({})
