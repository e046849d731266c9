"""Offloaded activations beside PyTorch's save_on_cpu: what a step takes above its start, as the allocator is asked."""

from unittest.mock import patch

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from refimpl.activations import offload_activations
from refimpl.activations.saved_tensors import SavedStorages
from refimpl.activations.transfer.schedule import TransferSchedule


def above(around, autocast):
    """The third step's peak above its start, of a GPT-2 with four layers."""
    transformers = pytest.importorskip("transformers")
    with torch.device("cuda"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=4, use_cache=False))
        tokens = torch.zeros(4, 1024, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast), around(model):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before


@pytest.mark.parametrize("autocast", [False, True])
def test_it_takes_what_save_on_cpu_takes_and_the_small_storages_that_stay(autocast):
    theirs = above(lambda model: save_on_cpu(pin_memory=True), autocast)
    ours = above(lambda model: offload_activations(model, depth=1), autocast)
    none_left = above(lambda model: offload_activations(model, depth=1, smallest=0), autocast)
    assert none_left <= 1.0001 * theirs and ours <= 1.002 * theirs


def test_mutants_that_fetch_ahead_of_the_loss_or_keep_casts_take_more():
    class Eager(TransferSchedule):
        def _begin(self, task):
            super()._begin(task)
            return False

    theirs = above(lambda model: save_on_cpu(pin_memory=True), True)
    with patch("refimpl.activations.offload.TransferSchedule", Eager):
        assert above(lambda model: offload_activations(model, depth=1), True) > 1.002 * theirs
    made_of = SavedStorages._made_of
    with patch.object(SavedStorages, "_made_of", lambda self, node: (made_of(self, node)[0], [])):
        assert above(lambda model: offload_activations(model, depth=1), True) > 1.02 * theirs
