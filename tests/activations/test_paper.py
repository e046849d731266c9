"""The idea in one screen has the codes, the gradients and the bytes of `compress_activations`."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from one_screen import check_paper
from paper_kit import MODELS, built, gradients, same

from refimpl import memory
from refimpl.activations import compress_activations
from refimpl.activations.codecs import encode_groups
from refimpl.papers import activations as paper

GROUPS = 8 * 32 * 256 // 128  # of the log-probabilities, the largest storage
MASKS = {"gpt": 2 * 32 * 32 - 2 * 32 * 32 // 8, "llama": 0}  # two causal masks in bytes, not bits; SDPA saves none


def test_the_file_is_one_screen():
    check_paper("activations", "activations")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 127, 128, 1000])
def test_codes_and_values_are_the_hardened_ones_to_the_bit(n, dtype):
    flat = torch.randn(n).to(dtype)
    flat[: n // 2] = 3  # whole groups of one value: their step is 0
    hardened, found = encode_groups(flat, 128), paper.encode(flat, 128)
    assert same([found[0], torch.cat(found[1:], 1).T], [hardened.codes, hardened.ranges])
    assert torch.equal(paper.decode(*found, 128).to(dtype), hardened.decode())
    assert sum(each.untyped_storage().nbytes() for each in found) == n + 8 * -(-n // 128)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_to_the_bit_and_bytes_to_the_byte(name):
    def step(name, around):
        """Run a forward and a backward: (gradients, bytes after the forward, bytes at the peak)."""
        model, *batch = built(name)
        with memory.track(model, *batch) as t:
            with around(model):
                loss = model(*batch)
            after = t.now
            loss.backward()
        return gradients(model), after, t.peak.total
    idea, kept, peak = step(name, paper.compressed)
    hardened, kept_there, peak_there = step(name, partial(compress_activations, smallest=0))
    assert same(idea, hardened)
    # The hardened one packs masks into bits, too.
    assert kept["activations"] - kept_there["activations"] == MASKS[name]
    # At the peak the hardened one has a table of ranges beside least values and steps (8 bytes a group), and looks for
    # inf and NaN in it (another copy, and three flags for each of its numbers).
    assert peak_there - peak == 22 * GROUPS - MASKS[name]
    plain, kept_whole, peak_whole = step(name, lambda model: nullcontext())  # saves nothing
    assert kept_whole["activations"] > 3.6 * kept["activations"] and peak_whole > 1.7 * peak
    assert 0 < max(((a - b).norm() / b.norm()).item() for a, b in zip(idea, plain, strict=True)) < 0.02


def test_what_was_changed_in_place_is_encoded_again():
    model, x = torch.nn.Linear(64, 64), torch.randn(64, 64)
    def run(around):
        with around:
            y = model(x)
            first = y.sin()  # saves y
            y.mul_(2).add_(1)
            second = y.cos()  # saves it again, with other values
        (first + second).sum().backward()
        return gradients(model)
    found = run(paper.compressed(model))
    assert same(found, run(compress_activations(model, smallest=0)))
    y = model(x)
    (y.sin() + (2 * y + 1).cos()).sum().backward()
    assert all((a - b).norm() < 0.01 * b.norm() for a, b in zip(found, gradients(model), strict=True))


def test_nothing_is_left_after_backward():
    model, *batch = built("gpt")
    with memory.track(model, *batch) as t:
        with paper.compressed(model):
            loss = model(*batch)
        loss.backward()
        del loss
        gradients(model)
    assert t.now == t.start
