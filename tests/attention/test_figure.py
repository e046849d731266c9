"""Figures show what they are given, and the tiles that are drawn are those that are computed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from refimpl import catalog
from refimpl.attention import attention_flops, tiled_attention
from refimpl.attention.figure import computed_tiles, plot_online, plot_peaks, plot_roofs, plot_tiles, slope

CALLS = {"all": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 20}, "both ways": {"window": 9},
         "packed": {"causal": True, "cu_seqlens": [0, 30, 30, 41, 96]}}


def is_png(figure):
    return figure._repr_png_().startswith(b"\x89PNG")


def test_every_line_and_point_is_there():
    predicted = {"dense": {256: 4.0, 512: 16.0, 1024: 64.0}, "tiled": {256: 10.0, 512: 20.0, 1024: 40.0}}
    figure = plot_peaks(predicted, {"tiled": {256: 10.0}})
    lines = {tuple(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines >= {(4, 16, 64), (10, 20, 40), (10,)} and is_png(figure)
    assert slope(predicted["dense"]) == 2 and slope(predicted["tiled"]) == 1
    words = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert words[:2] == ["dense, slope 2.00 at the end", "tiled, slope 1.00 at the end"]
    assert figure.axes[0].get_xlabel() == "tokens"
    axes = plot_peaks(predicted, {}, over="tokens of a chunk", slopes=False).axes[0]
    assert axes.get_legend().get_texts()[0].get_text() == "dense" and axes.get_xlabel() == "tokens of a chunk"
    seven = {str(n): {256: 2.0**n, 512: 4.0**n} for n in range(7)}
    axes = plot_peaks(seven, {}, count=lambda number: f"{number:g} FLOPs").axes[0]
    assert len({line.get_color() for line in axes.lines}) == 7
    assert axes.yaxis.get_major_formatter()(4.0) == "4 FLOPs"
    with pytest.raises(ValueError, match="measured .'sparse'.: expected some of"):
        plot_peaks(predicted, {"sparse": {256: 1.0}})


def test_an_online_softmax_shows_its_running_values():
    scores = torch.tensor([[1.0, 0.0, 3.0], [2.0, 2.0, 1.0]])
    states = [[torch.tensor([[a], [b]]) for a, b in state] for state in (
        ((0.0, 0.0), (1.0, 2.0), (1.5, 2.0), (7.0, 8.0)), ((0.25, 1.0), (3.0, 2.0), (1.375, 2.5), (9.0, 10.0)))]
    figure = plot_online(scores, states, 2)
    words = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert len(words) == 2 and "1.375" in words[1] and "× 0.25" in words[1] and "1.375" not in words[0]
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["after the tile of keys 0 to 1", "after the tile of keys 2 to 2"] and is_png(figure)


def test_an_online_softmax_has_each_word_above_its_cells_and_no_cell_on_another():
    state = [torch.full((2, 1), value) for value in (0.5, 1.0, 1.5, 7.0)]
    axes = plot_online(torch.zeros(2, 3), [state], 3).axes[0]
    cells = sorted({(cell.get_x(), cell.get_x() + cell.get_width()) for cell in axes.patches})
    assert len(cells) == 6 and all(a[1] <= b[0] + 1e-9 for a, b in zip(cells, cells[1:], strict=False))
    left, right = axes.get_xlim()
    assert left < cells[0][0] and cells[-1][1] < right, "a cell is cut off"
    words = {text.get_text(): text.get_position()[0] for text in axes.texts}
    middles = [words[name] for name in ("key 0", "key 1", "key 2", "m", "l", "O")]
    assert middles == pytest.approx([(left + right) / 2 for left, right in cells])
    assert cells[2][1] < words["shrink"] == words["× 0.5"] < cells[3][0]


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_the_tiles_drawn_are_those_computed(options):
    T, size, found = 96, 16, computed_tiles(96, 16, **options)
    seen = torch.zeros(T, T)
    for (first, end), (left, right), masked in found:
        assert 0 < end - first <= size and 0 < right - left <= size and type(masked) is bool
        seen[first:end, left:right] += 1
    assert seen.max() == 1
    q, k, v = torch.ones(1, 1, T, 8), torch.ones(1, 1, T, 8), torch.eye(T)[None, None, :, :8]
    with FlopCounterMode(display=False) as counted:
        tiled_attention(q, k, v, query_tile=size, key_tile=size, **options)
    assert counted.get_total_flops() == 4 * 8 * seen.sum()
    pairs = attention_flops(q.shape, k.shape, **options).pairs
    assert (seen.sum() > pairs) == any(masked for *_, masked in found) and seen.sum() >= pairs


def test_a_panel_for_each_call():
    figure = plot_tiles(CALLS, 96, 16)
    assert [axes.get_title() for axes in figure.axes][:2] == ["all: 36 tiles", "causal: 21 tiles"]
    assert len(figure.axes) == len(CALLS) and is_png(figure) and figure.axes[0].get_xlim()[1] == pytest.approx(96)


def test_a_roof_for_each_computation():
    gpu = catalog.hardware("h100-sxm")
    figure = plot_roofs(gpu, {"dense": 64, "flash": 4096})
    points = {tuple(line.get_xydata()[0]) for line in figure.axes[0].lines if len(line.get_xdata()) == 1}
    assert points == {(64, 64 * gpu.memory_bandwidth), (4096, gpu.bf16_flops)}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "dense: 64 FLOPs a byte, at most 22 % of the peak", "flash: 4,096 FLOPs a byte, at most 100 % of the peak"]
    assert is_png(figure)
