"""The bench of block-sparse attention at a tiny size; and that it would show a form that skips nothing."""

import pytest
import torch

from benchmarks import sparse
from refimpl.attention.masks import bigbird_mask, longformer_mask


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(sparse, "HEADS", 2)
    monkeypatch.setattr(sparse, "masks", lambda T: {"window": longformer_mask(T, 10), "by head": bigbird_mask(
        T, 0, 0, 1, 0, heads=2)})
    whole = torch.compile  # which takes seconds; the eager form calls it, too, with a backend
    monkeypatch.setattr(torch, "compile", lambda function, **given: whole(function, **given) if given else function)


def test_each_mask_is_read_beside_the_dense_form_and_flex_attention(run, small):
    settings, rows = run(sparse, 512, 2)
    assert settings["shape"]["tokens"] == 512
    read = {(row["what"], row["peer"]) for row in rows}
    assert {("forward, window", sparse.COMPILED), ("forward and backward, by head", sparse.DENSE)} <= read
    assert len(rows) == len(read) == 5  # FlexAttention has no backward on a CPU, and no C++ for lists of each head
    for row in rows:
        assert row["value"] > 0 and (row["peer"] != sparse.DENSE or row["over the share"] > 0)


def test_the_masks_go_down_to_a_sixteenth_of_the_blocks():
    found = sparse.masks(4096)
    assert min(mask.tile_density for mask in found.values()) == 1 / 16
    assert max(mask.tile_density for mask in found.values()) > 0.4 and any(mask.shape[1] > 1 for mask in found.values())


def test_a_form_that_skips_nothing_and_one_that_is_wrong_are_seen(run, small, monkeypatch):
    everything = longformer_mask(512, 512)
    monkeypatch.setattr(sparse, "block_sparse_attention", lambda q, k, v, mask, kernel: sparse.tiled_attention(q, k, v))
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        run(sparse, 512, 2)
    monkeypatch.setattr(sparse, "masks", lambda T: {"all": everything})
    assert all(row["over the share"] < 3 for row in run(sparse, 512, 2)[1] if row["peer"] == sparse.DENSE)
