"""The band against its definition, pair by pair."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.attention.call.band import Band, tiles

BOUND = st.none() | st.integers(0, 9)


def sees(band, i, j):
    position = i + band.S - band.T
    left = band.left is None or position - j <= band.left
    return left and (band.right is None or j - position <= band.right)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(0, 9), st.integers(0, 9), BOUND, BOUND, st.data())
def test_every_question_agrees_with_the_definition(T, S, left, right, data):
    band = Band(T, S, left, right)
    seen = [[j for j in range(S) if sees(band, i, j)] for i in range(T)]
    assert band.pairs() == sum(map(len, seen))
    assert [not row for row in seen] == [i < band.fully_masked for i in range(T)]
    if not T or not S:
        return
    first, last = sorted((data.draw(st.integers(0, T - 1)), data.draw(st.integers(0, T - 1))))
    rows = (first, last + 1)
    anyone = sorted({j for i in range(*rows) for j in seen[i]})
    assert list(range(*band.keys_seen(rows))) == anyone
    first, last = sorted((data.draw(st.integers(0, S - 1)), data.draw(st.integers(0, S - 1))))
    keys = (first, last + 1)
    expected = torch.tensor([[j not in seen[i] for j in range(*keys)] for i in range(*rows)])
    mask = band.mask(rows, keys, "cpu")
    assert torch.equal(expected, torch.zeros_like(expected) if mask is None else mask)
    assert (mask is None) == (not expected.any())


def test_causal_and_window_as_flash_attention_has_them():
    assert Band.of(4, 6, True, None) == (4, 6, None, 0) and Band.of(4, 6, False, None) == (4, 6, None, None)
    assert Band.of(4, 6, True, 2) == (4, 6, 2, 0) and Band.of(4, 6, False, 2) == (4, 6, 2, 2)
    assert Band.of(1, 6, True, None).keys_seen((0, 1)) == (0, 6)  # one new query beside the last of six keys


def test_tiles_cover_a_span():
    assert tiles((3, 10), 4) == [(3, 7), (7, 10)] and tiles((5, 5), 4) == []
