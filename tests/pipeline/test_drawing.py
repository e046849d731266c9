"""The picture has the bars, labels and lines of the simulation."""

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from refimpl.pipeline.drawing import NAMES, draw, drawing_data
from refimpl.pipeline.instructions import BACKWARD, FORWARD, INPUT, WEIGHT
from refimpl.pipeline.named_schedules import BUILDERS, schedule
from refimpl.pipeline.step_simulation import Costs, simulate


@pytest.mark.parametrize("name", BUILDERS)
def test_a_bar_for_each_instruction(name):
    step = simulate(schedule(name, 4, 8), Costs(1, 2, 3))
    found = {(kind, rank, begin, end, j) for (kind, _), (rectangles, micro_batches) in drawing_data(step).items()
             for (begin, end, rank), j in zip(rectangles.tolist(), micro_batches, strict=True)}
    assert found == {(i.kind, r, begin, end, i.micro_batch) for r, rank in enumerate(step.ranks)
                     for i, begin, end in rank}
    drawn = [each for each in draw(step).axes[0].collections if isinstance(each, PolyCollection)]
    assert sum(len(each.get_paths()) for each in drawn) == len(found)


def colours_of(step):
    bars = zip(drawing_data(step), draw(step).axes[0].collections, strict=True)
    return {key: each.get_facecolor()[0][:3] for key, each in bars}


def test_bars_of_a_kind_are_one_colour_and_later_stages_are_paler():
    colours = colours_of(simulate(schedule("zb-v", 2, 4)))
    assert colours.keys() == {(kind, chunk) for kind in (FORWARD, INPUT, WEIGHT) for chunk in (0, 1)}
    assert len({tuple(each) for each in colours.values()}) == 6
    assert all((colours[kind, 1] > colours[kind, 0]).all() for kind in (FORWARD, INPUT, WEIGHT))


def test_rectangles_stand_where_their_rank_and_time_are():
    step = simulate(schedule("1f1b", 2, 2))
    (rectangles, micro_batches) = drawing_data(step)[BACKWARD, 0]
    assert rectangles.tolist() == [[4, 6, 0], [7, 9, 0], [2, 4, 1], [5, 7, 1]] and micro_batches == [0, 1, 0, 1]
    corners = draw(step).axes[0].collections[1].get_paths()[0].vertices
    assert np.allclose(corners[:4], [[4, -0.43], [6, -0.43], [6, 0.43], [4, 0.43]])


def test_fine_bars_are_an_image_of_the_same_colours():
    """At the middle of each bar is its kind's colour, and white where a rank does nothing."""
    step = simulate(schedule("zb-v", 8, 100))
    (image,) = draw(step).axes[0].images
    colours = colours_of(simulate(schedule("zb-v", 8, 4)))
    pixels, width = image.get_array(), image.get_array().shape[1] / step.step_time
    for key, (rectangles, _) in drawing_data(step).items():
        for begin, end, rank in rectangles:
            assert np.allclose(pixels[int(rank), int((begin + end) / 2 * width)], colours[key])
    assert np.allclose(pixels[7, : int(6.9 * width)], 1) and image.get_extent() == [0, step.step_time, 7.5, -0.5]


def test_the_legend_names_what_is_there():
    for name, kinds in (("1f1b", {FORWARD, BACKWARD}), ("zb-h1", {FORWARD, INPUT, WEIGHT}),
                        ("dualpipe-v", {FORWARD, BACKWARD, INPUT, WEIGHT})):
        (legend,) = draw(simulate(schedule(name, 4, 8))).legends
        assert {text.get_text() for text in legend.get_texts()} == {NAMES[kind] for kind in kinds}


def test_micro_batches_are_written_where_there_is_room():
    assert len(draw(simulate(schedule("1f1b", 4, 8))).axes[0].texts) == 4 * 8 * 2
    assert not any(draw(simulate(schedule("1f1b", *sizes))).axes[0].texts for sizes in ((4, 200), (64, 4)))


def test_lines_are_the_bytes_of_each_rank():
    step = simulate(schedule("zb-h1", 4, 8), activation_bytes=3 * 2**20, kept_bytes=2**20)
    lines = draw(step).axes[1].lines
    assert len(lines) == 4 and draw(step).axes[1].get_ylabel() == "held, MiB"
    assert [max(line.get_ydata()) for line in lines] == [nbytes / 2**20 for nbytes in step.peak_bytes]
    assert all(line.get_ydata()[-1] == 0 for line in lines)
    assert draw(simulate(schedule("zb-h1", 4, 8))).axes[1].get_ylabel() == "held, activations"


def test_the_title_says_step_and_idle_time():
    step = simulate(schedule("1f1b", 4, 8), Costs(0.5, 0.5, 0.5))
    assert draw(step).axes[0].get_title(loc="left") == "1f1b: step 16.5, idle at most 4.5 on one rank"
    assert draw(step, "mine", unit="s").axes[0].get_title(loc="left") == (
        "mine: step 16.5 s, idle at most 4.5 s on one rank")


def test_a_picture_is_as_wide_as_a_page_or_as_is_said_and_up_to_16_ranks_have_large_names():
    for ranks, given, width, letters in ((16, {}, 9.5, 9), (17, {"width": 7}, 7, 7)):
        figure = draw(simulate(schedule("gpipe", ranks, 1)), **given)
        assert figure.get_figwidth() == width
        assert {name.get_fontsize() for name in figure.axes[0].get_yticklabels()} == {letters}
