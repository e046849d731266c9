"""The idea in one screen beside tiled_attention: the same bits, forward and backward, and the same bytes kept."""

import functools

import attention_kit as kit
import pytest
import torch
from one_screen import check_paper
from torch.nn import functional as F

from refimpl import memory
from refimpl.attention import reference_attention, tiled_attention
from refimpl.model import GPT, GPTConfig
from refimpl.papers import flash_attention as paper

TILE = 16
hardened = functools.partial(tiled_attention, causal=True, query_tile=TILE, key_tile=TILE)
dense = functools.partial(reference_attention, causal=True)  # the mutant: right values, with the T × T matrix


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(paper, "TILE", TILE)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("T", [1, 15, 16, 17, 40, 64])
def test_the_same_bits(T, dtype):
    found = (kit.gradients(f, *kit.inputs(2, 3, 3, T, T, 8, dtype)) for f in (paper.attention, hardened))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_it_is_the_definition():
    found = (kit.gradients(f, *kit.inputs(2, 3, 3, 37, 37, 8, torch.float64)) for f in (paper.attention, dense))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def assert_same_bytes(ours):
    """(B, H, D) = (1, 2, 16): what forward keeps, and what backward takes on top of it."""
    rest = []
    for T in (64, 128, 256):
        (kept, peak), (kept_by_hardened, peak_of_hardened) = (kit.read(f, ((1, 2, T, 16),) * 2, torch.float64)
                                                              for f in (ours, hardened))
        assert kept == kept_by_hardened == 8 * (2 * T * 16 + 2 * T)  # O and L
        gradients, delta = 3 * 8 * 2 * T * 16, 8 * 2 * T  # Δ: of all rows here, of a tile's in the hardened one
        rest.append((peak - kept - gradients - delta, peak_of_hardened - kept_by_hardened - gradients))
    assert len(set(rest)) == 1  # the tiles: the same for any T; there are fewer at a time here
    assert rest[0][0] <= rest[0][1]


def test_the_same_bytes():
    assert_same_bytes(paper.attention)


def test_the_dense_version_fails_here():
    with pytest.raises(AssertionError):
        assert_same_bytes(dense)


def in_gpt(function):
    """(logits, gradients, bytes that are kept for backward) of our GPT with this attention."""
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, context_length=128, layers=2, hidden=32, heads=4)
    model = GPT(config, attention=function, dtype=torch.float64)
    tokens = torch.randint(0, 64, (2, 128))
    with memory.track(model, tokens) as t:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        kept = t.now["activations"]
        loss.backward()
    return logits.detach(), [p.grad for p in model.parameters()], kept


def test_in_our_gpt():
    (ours, our_gradients, kept), (theirs, their_gradients, kept_by_hardened) = map(in_gpt, (paper.attention, hardened))
    torch.testing.assert_close((ours, our_gradients), (theirs, their_gradients), rtol=1e-12, atol=1e-12)
    copies = 2 * 8 * 2 * 128 * 32  # of O, one a layer: here O lies in memory as q does, so the GPT's reshape is a view
    assert kept == kept_by_hardened - copies < in_gpt(dense)[2] - copies


def test_one_screen_that_is_read_first():
    check_paper("attention", "flash_attention")
