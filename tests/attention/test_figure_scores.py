"""Figures of hooks and caches show what they are given."""

import torch

from refimpl.attention import Documents, Softcap
from refimpl.attention.figure_scores import after, plot_cache, plot_hooks


def test_what_is_hidden_is_grey_and_all_panels_are_there():
    calls = {"documents": {"score": Documents(torch.tensor([[0, 0, 1, 1]])), "causal": True}, "sinks": {"sinks": None}}
    assert torch.equal(after(calls["documents"], 4).isinf(), torch.tensor(
        [[0, 1, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0]]).bool())
    assert (after({"score": Softcap(2.0)}, 3) == 0).all()
    figure = plot_hooks(calls, T=4, tile=2)
    assert [axes.get_title() for axes in figure.axes] == ["documents", "sinks"]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_bar_for_each_cache():
    figure = plot_cache({"MHA": 4096, "MLA": 1024}, "bytes")
    assert [bar.get_width() for bar in figure.axes[0].patches] == [4096, 1024]
    assert {"4.0 KiB", "1.0 KiB"} <= {text.get_text() for text in figure.axes[0].texts}
