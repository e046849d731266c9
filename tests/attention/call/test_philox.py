"""Philox against the published vectors and Triton's own, and the mask against its definition."""

import math
import sys

import pytest
import torch
from interpreting import interpreted

from refimpl.attention.call.philox import dropped, philox

# Random123, tests/kat_vectors, the lines "philox4x32 10": counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1")]


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_the_published_vectors(counter, key, result):
    counter, (low, high), result = ([int(word, 16) for word in text.split()] for text in (counter, key, result))
    seed = low | high << 32
    for given in (seed, torch.tensor(seed - 2**64 if seed >= 2**63 else seed)):  # and as int64
        assert [word.item() for word in philox(given, *(torch.tensor([word]) for word in counter))] == result


@pytest.mark.skipif(sys.platform != "linux", reason="triton is there on Linux only")
def test_tritons_words_and_a_tile_drawn_by_a_kernel():
    M, N, p = 16, 8, 0.3
    seeds = (0, 7, 0xA409382212345678 & (2**63 - 1))
    drawn = interpreted([("kernels_to_interpret:drawn", (seed, int(p * 2**32), 5, 48, 24, M, N), {}) for seed in seeds])
    for seed, (first, third, mask) in zip(seeds, drawn, strict=True):
        rows, groups = torch.arange(48, 64)[:, None], torch.arange(24, 32)
        assert torch.equal(philox(seed, groups, rows, 5, 0)[0], first)
        ours = dropped(seed, p, 2, 3, (48, 64), (96, 128), "cpu")  # head 5 of 6: batch 1, head 2
        assert torch.equal(ours[1, 2], mask.bool()), seed
        assert torch.equal(philox(seed, torch.arange(M * N).view(M, N), 0, torch.tensor(0), 0)[2], third)


def test_the_mask_by_its_definition():
    mask, threshold = dropped(11, 0.4, 2, 3, (5, 9), (2, 13), "cpu"), int(0.4 * 2**32)
    assert mask.shape == (2, 3, 4, 11) and mask.dtype == torch.bool
    for b, h, i, j in [(0, 0, 5, 2), (0, 1, 6, 4), (1, 0, 7, 7), (1, 2, 8, 12), (0, 2, 5, 9)]:
        word = philox(11, torch.tensor(j // 4), i, torch.tensor(b * 3 + h), 0)[j % 4]
        assert mask[b, h, i - 5, j - 2] == (word < threshold)


@pytest.mark.parametrize("rows", [(0, 1), (3, 8), (7, 8)])
@pytest.mark.parametrize("columns", [(0, 12), (3, 5), (4, 8), (9, 12)])
def test_a_tile_of_the_mask_is_cut_from_the_whole(rows, columns):
    whole = dropped(torch.tensor(5), 0.5, 2, 2, (0, 8), (0, 12), "cpu")
    assert torch.equal(dropped(5, 0.5, 2, 2, rows, columns, "cpu"), whole[:, :, slice(*rows), slice(*columns)])


def test_as_many_are_dropped_as_asked_for_and_independently():
    for p in (0.1, 0.5, 0.9):
        mask = dropped(1, p, 2, 4, (0, 128), (0, 128), "cpu").double()
        assert abs(mask.mean().item() - p) < 4 * math.sqrt(p * (1 - p) / mask.numel())
        for shifted in (mask.roll(1, -1), mask.roll(1, -2), mask.roll(1, -3), mask.roll(1, 0)):
            covariance = ((mask - p) * (shifted - p)).mean().item()
            assert abs(covariance) < 5 * p * (1 - p) / math.sqrt(mask.numel())
    assert not torch.equal(dropped(1, 0.5, 1, 1, (0, 8), (0, 8), "cpu"), dropped(2, 0.5, 1, 1, (0, 8), (0, 8), "cpu"))


def test_a_seed_on_the_device_gives_the_same_mask_as_an_int():
    ours = dropped(torch.tensor(2**40 + 3), 0.5, 1, 2, (0, 8), (0, 8), "cpu")
    assert torch.equal(ours, dropped(2**40 + 3, 0.5, 1, 2, (0, 8), (0, 8), "cpu"))
