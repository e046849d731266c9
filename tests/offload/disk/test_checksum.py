"""The checksum of a block: its definition, and what it finds."""

import numpy as np
import pytest

from refimpl.offload.disk.checksum import checksum


@pytest.fixture
def block():
    return np.random.default_rng(0).integers(0, 256, 3 * 4096, dtype=np.uint8)


def test_it_is_the_sum_of_words_times_odd_weights_of_their_places(block):
    words = block.view(np.uint64)
    assert checksum(block) == sum((2 * k + 1) * int(x) for k, x in enumerate(words)) % 2**64


def test_any_flipped_bit_is_found(block):
    expected = checksum(block)
    for bit in [*range(0, 8 * len(block), 997), 63, 8 * len(block) - 1]:
        block[bit // 8] ^= 1 << bit % 8
        assert checksum(block) != expected, bit
        block[bit // 8] ^= 1 << bit % 8
    assert checksum(block) == expected


def test_words_that_changed_places_and_zeros_in_place_of_words_are_found(block):
    expected, words = checksum(block), block.view(np.uint64)
    words[[3, 700]] = words[[700, 3]]
    assert checksum(block) != expected
    words[[3, 700]] = words[[700, 3]]
    words[512:1024] = 0
    assert checksum(block) != expected


def test_a_plain_sum_would_not_find_words_that_changed_places(block):
    """The mutant: why weights."""
    words = block.view(np.uint64)
    before = words.sum()
    words[[3, 700]] = words[[700, 3]]
    assert words.sum() == before
