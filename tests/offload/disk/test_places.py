"""Places in a file: none overlaps another, what is free is taken again, a disk that is full changes nothing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.offload.disk.places import Places

BLOCK = 4096


def check(places):
    """Taken and free places cover the file, once."""
    taken, at = [place for place in places.of.values() if place[1]], 0
    for offset, nbytes in sorted([*taken, *places._free]):
        assert offset == at and nbytes > 0
        at += nbytes
    assert at == places.end
    assert all(sum(a) < b[0] for a, b in zip(places._free, places._free[1:], strict=False))  # or they would be one


@given(st.integers(0, 10**6))
def test_no_place_overlaps_another_whatever_comes(seed):
    rng, places = random.Random(seed), Places()
    for _ in range(60):
        key, nbytes = rng.randrange(8), rng.randrange(5) * BLOCK - rng.randrange(2)
        offset, given = places.place(key, max(nbytes, 0))
        assert places.of[key] == (offset, given) and given >= nbytes and offset % BLOCK == 0
        check(places)


def test_a_place_stays_as_long_as_its_size_does():
    places = Places()
    assert places.place("a", 5000) == (0, 2 * BLOCK) == places.place("a", 8000)
    assert places.place("b", 1) == (2 * BLOCK, BLOCK)


def test_places_that_were_given_back_are_merged_and_taken_again():
    """Masters first, then states of thrice their bytes: the file ends with less than a bucket that lies free."""
    places = Places()
    for key in range(12):
        places.place(key, BLOCK)
    for key in range(12):
        places.place(key, 3 * BLOCK)
        check(places)
    assert places.end <= 12 * 3 * BLOCK + 2 * BLOCK


def test_a_full_disk_changes_nothing():
    places = Places()
    places.place("a", BLOCK)
    places.place("b", BLOCK)
    def full(end):
        raise OSError(28, f"no room for {end}")
    with pytest.raises(OSError, match=f"no room for {4 * BLOCK}"):
        places.place("a", 2 * BLOCK, full)
    assert places.of == {"a": (0, BLOCK), "b": (BLOCK, BLOCK)} and places.end == 2 * BLOCK
    check(places)
