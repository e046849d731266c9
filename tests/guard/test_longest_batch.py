"""The length at which a batch would not fit, by those of three shorter ones."""

import pytest

from refimpl.guard.longest_batch import LongestBatch, rows_and_length


def taken(rows, length):
    return 1000 + rows * (50 * length + 2 * length**2)


def after(lengths, rows=4):
    found = LongestBatch()
    return found, [found.add((rows, length), taken(rows, length)) for length in lengths]


def test_the_longest_is_told_and_where_one_would_not_fit():
    batches, longest = after([64, 128, 96, 256])
    assert longest == [False, True, False, True] and batches.longest == 256
    for room in (taken(4, 256) + 1, taken(4, 300) - 1, taken(4, 320) - 1):
        length = batches.would_not_fit((4, 256), room)
        assert taken(4, length) > room >= taken(4, length - 1)
    assert batches.would_not_fit((4, 256), taken(4, 321)) is None  # a quarter longer still fits: nothing is said
    assert batches.would_not_fit((8, 256), 0) is None  # of as many rows nothing is known
    assert after([64, 128])[0].would_not_fit((4, 128), 0) is None  # two lengths tell no square


@pytest.mark.parametrize(("shape", "expected"), [((8, 128), (8, 128)), ((8, 128, 32), (8, 128)), ((5,), (5, 1)),
                                                 ((2, 3, 16, 20), (2, 320)), ((), (1, 1))])
def test_rows_and_length(shape, expected):
    assert rows_and_length(shape) == expected
