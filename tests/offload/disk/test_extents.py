"""Parts of a file: none overlaps another, what is free is taken again, a disk that is full changes nothing."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.offload.disk.extents import FileExtents

BLOCK = 4096


def check(extents):
    """Taken and free places cover the file, once."""
    taken, at = [place for place in extents.of.values() if place[1]], 0
    for offset, nbytes in sorted([*taken, *extents._free]):
        assert offset == at and nbytes > 0
        at += nbytes
    assert at == extents.end
    assert all(sum(a) < b[0] for a, b in zip(extents._free, extents._free[1:], strict=False))  # or they would be one


@given(st.integers(0, 10**6))
def test_no_place_overlaps_another_whatever_comes(seed):
    rng, extents = random.Random(seed), FileExtents()
    for _ in range(60):
        key, nbytes = rng.randrange(8), rng.randrange(5) * BLOCK - rng.randrange(2)
        offset, given = extents.allocate(key, max(nbytes, 0))
        assert extents.of[key] == (offset, given) and given >= nbytes and offset % BLOCK == 0
        check(extents)


def test_a_place_stays_as_long_as_its_size_does():
    extents = FileExtents()
    assert extents.allocate("a", 5000) == (0, 2 * BLOCK) == extents.allocate("a", 8000)
    assert extents.allocate("b", 1) == (2 * BLOCK, BLOCK)


def test_places_that_were_given_back_are_merged_and_taken_again():
    """Masters first, then states of thrice their bytes: the file ends with less than a bucket that lies free."""
    extents = FileExtents()
    for key in range(12):
        extents.allocate(key, BLOCK)
    for key in range(12):
        extents.allocate(key, 3 * BLOCK)
        check(extents)
    assert extents.end <= 12 * 3 * BLOCK + 2 * BLOCK


def test_a_full_disk_changes_nothing():
    extents = FileExtents()
    extents.allocate("a", BLOCK)
    extents.allocate("b", BLOCK)
    def full(end):
        raise OSError(28, f"no room for {end}")
    with pytest.raises(OSError, match=f"no room for {4 * BLOCK}"):
        extents.allocate("a", 2 * BLOCK, full)
    assert extents.of == {"a": (0, BLOCK), "b": (BLOCK, BLOCK)} and extents.end == 2 * BLOCK
    check(extents)
