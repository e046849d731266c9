"""Lifetimes: read from a trace, rounded, added up; what makes no sense is named."""

import numpy as np
import pytest
from allocator_kit import random_trace

from refimpl.allocator import plan_static
from refimpl.allocator.static import Lifetimes
from refimpl.common.allocations import Maker
from refimpl.common.lifetimes import most_live


def test_lives_begin_and_end_with_events():
    found = Maker()
    a, b = found.alloc(100), found.alloc(30)
    found.free(a)
    found.alloc(5)
    found.free(b)
    lifetimes = Lifetimes.of(found.trace())
    assert lifetimes.begins.tolist() == [0, 1, 3] and lifetimes.ends.tolist() == [2, 4, 5]
    assert lifetimes.aligned(64).tolist() == [128, 64, 64] and lifetimes.lower_bound == 130
    assert Lifetimes.of(lifetimes) is lifetimes and len(lifetimes) == 3


def test_the_lower_bound_is_the_peak_of_the_trace():
    trace = random_trace(3000)
    assert Lifetimes.of(trace).lower_bound == trace.peak


def test_what_ends_does_not_meet_what_begins():
    assert most_live(np.array([0, 2]), np.array([2, 4]), np.array([5, 7])) == 7
    assert most_live(np.array([0, 1]), np.array([2, 4]), np.array([5, 7])) == 12
    assert most_live(np.array([3]), np.array([3]), np.array([5])) == 0


@pytest.mark.parametrize(("given", "message"), [
    (([0], [1, 2], [3]), "1 beginnings, 2 ends, 1 sizes"), (([0], [1], [-3]), "block 0 has no size"),
    (([0, 4], [1, 3], [3, 3]), "block 1 ends before it begins: 4 … 3")])
def test_what_makes_no_sense_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        Lifetimes(*given)


def test_a_block_with_two_lives_is_named():
    found = Maker()
    found.free(found.alloc(10))
    found._events.append((1, 0, 0, 0))
    with pytest.raises(ValueError, match="block 0 is taken 2 times"):
        plan_static(found.trace())


def test_a_block_without_bytes_takes_no_room():
    assert Lifetimes([0, 0], [1, 1], [0, 5]).lower_bound == 5
