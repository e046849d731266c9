"""The idea in one screen has the numbers and the bytes of `accumulate`; a version that saves nothing has neither."""

import pytest
import torch
from one_screen import check_paper
from paper_kit import MODELS, built, gradients, same
from ragged_kit import whole

from refimpl import memory
from refimpl.accumulation import accumulate
from refimpl.papers import accumulation as paper


def test_the_file_is_one_screen():
    check_paper("accumulation", "accumulation")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 8])
def test_loss_and_gradients_are_the_hardened_ones_to_the_bit(name, micro_batch):
    model, *batch = built(name)
    batch[1][2:4] = -100  # a micro-batch of two without any target
    loss, found = paper.accumulate(model, *batch, micro_batch), gradients(model)
    assert torch.equal(loss, accumulate(model, *batch, micro_batch=micro_batch)) and same(found, gradients(model))


@pytest.mark.parametrize("name", MODELS)
def test_in_fp64_they_are_those_of_the_whole_batch(name, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # the loss, and each share of it
    model, *batch = built(name, torch.float64)
    loss, expected = whole(model, *batch)
    assert (paper.accumulate(model, *batch, 3) - loss).abs() < 1e-12
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(gradients(model), expected, strict=True))
    for tokens, targets in zip(batch[0].split(4), batch[1].split(4), strict=True):
        (model(tokens, targets) / 2).backward()  # the usual 1/k
    assert max((a - b).abs().max() for a, b in zip(gradients(model), expected, strict=True)) > 1e-4


@pytest.mark.parametrize("name", MODELS)
def test_fp32_sums_are_the_hardened_ones_to_the_bit(name):
    model, *batch = built(name, torch.bfloat16)
    with paper.Fp32Sums(model.parameters()):
        paper.accumulate(model, *batch, 1)
    found = gradients(model)
    accumulate(model, *batch, micro_batch=1)
    assert same(found, gradients(model))
    paper.accumulate(model, *batch, 1)
    assert not same(found, gradients(model)), "sums in bf16 would have been as good"


def peak(name, run, dtype=None):
    model, *batch = built(name, dtype)
    with memory.track(model, *batch) as t:
        run(model, *batch)
    return t.peak


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_the_hardened_ones(name):
    idea = peak(name, lambda *given: paper.accumulate(*given, 2))
    assert idea == peak(name, lambda *given: accumulate(*given, micro_batch=2))
    whole = peak(name, lambda *given: paper.accumulate(*given, 8))  # saves nothing
    assert whole["activations"] > 3 * idea["activations"]


@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_fp32_sums_are_the_hardened_ones(name):
    def idea(model, *batch):
        with paper.Fp32Sums(model.parameters()):
            paper.accumulate(model, *batch, 2)
    hardened = peak(name, lambda *given: accumulate(*given, micro_batch=2), torch.bfloat16)
    assert peak(name, idea, torch.bfloat16).total == hardened.total
