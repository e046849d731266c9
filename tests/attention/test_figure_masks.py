"""The figure of masks shows blocks by their kind, and in partial ones the pairs that are seen."""

import torch

from refimpl.attention import bigbird_mask, causal_mask
from refimpl.attention.figure_masks import COLOURS, plot_masks, shown


def test_each_pair_has_the_number_of_its_block_and_whether_it_is_seen():
    picture = shown(causal_mask(80, block=32))
    i, j = torch.arange(80)[:, None], torch.arange(80)
    wanted = torch.where(j // 32 < i // 32, 3, torch.where(j // 32 > i // 32, 0, torch.where(j <= i, 2, 1)))
    assert torch.equal(picture.long(), wanted)


def test_of_a_long_mask_blocks_are_drawn():
    mask = causal_mask(4096, block=256)
    assert torch.equal(shown(mask).long(), 3 * torch.ones(16, 16).tril(-1).long() + 2 * torch.eye(16).long())
    figure = plot_masks({"causal": mask})
    assert figure.axes[0].get_title() == "causal\n50.0% of pairs\nin 53.1% of blocks"
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_panel_for_each_mask_of_the_head_that_is_asked_for():
    mask = bigbird_mask(256, 16, 1, 2, 0, heads=2, block=32)
    figures = [plot_masks({"causal": causal_mask(256, block=32), "BigBird": mask}, head=head) for head in (0, 1)]
    for figure in figures:
        title = f"BigBird\n{mask.density:.1%} of pairs\nin {mask.tile_density:.1%} of blocks"
        assert figure.axes[1].get_title() == title and len(figure.legends[0].get_patches()) == len(COLOURS)
        assert figure._repr_png_().startswith(b"\x89PNG")
    first, second = (figure.axes[1].images[0].get_array() for figure in figures)
    assert (first != second).any() and (first == shown(mask).numpy()).all()
