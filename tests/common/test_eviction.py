"""Belady's rule and LRU on a trace."""

import functools
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.common.eviction import moved_bytes


@settings(max_examples=60, deadline=None)
@given(st.text("abcde", min_size=1, max_size=14), st.integers(1, 4))
def test_no_rule_loads_less_often_than_beladys(text, capacity):
    """Each block is made first, then read one after the other."""
    def fewest_loads(text, capacity):
        """By trying all: which block goes is free."""
        @functools.cache
        def best(place, here):
            if place == len(text):
                return 0
            if text[place] in here:
                return best(place + 1, here)
            if len(here) < capacity:
                return 1 + best(place + 1, here | {text[place]})
            return 1 + min(best(place + 1, here - {gone} | {text[place]}) for gone in here)
        return min(best(0, frozenset(kept)) for kept in itertools.combinations(sorted(set(text)), capacity))
    keys = sorted(set(text))
    capacity = min(capacity, len(keys))
    trace = [("changed", key, 1) for key in keys] + [(what, key, 1) for key in text for what in ("need", "same")]
    loaded = moved_bytes(trace, capacity)["loaded"]
    assert fewest_loads(text, capacity) == loaded <= moved_bytes(trace, capacity, "lru")["loaded"]


def test_a_cycle_is_the_worst_for_lru():
    trace = [(what, key, 10) for key in range(10) for what in ("need", "changed")]
    assert moved_bytes(trace, 50, "lru", steps=9) == {"loaded": 100, "evicted": 100}
    share = 5 / 9  # (N−C)/(N−1) of all
    assert moved_bytes(trace, 50, steps=19, first=1) == {"loaded": 18 * 100 * share, "evicted": 18 * 100 * share}


def test_what_was_only_read_is_not_written_back():
    trace = [(what, key, 1) for key in range(4) for what in ("need", "same")]
    assert moved_bytes([*[("changed", key, 1) for key in range(4)], *trace], 2)["evicted"] == 4 - 2 + 2 - 2 + 2 - 0
    assert moved_bytes(trace, 2, steps=3)["evicted"] == 0


def test_what_is_dropped_takes_no_room_and_moves_no_byte():
    trace = [(what, key, 1) for key in range(9) for what in ("changed", "need", "drop")]
    assert moved_bytes(trace, 1, steps=3) == {"loaded": 0, "evicted": 0}


def test_bad_input():
    with pytest.raises(ValueError, match="rule='fifo': expected one of belady, lru"):
        moved_bytes([], 1, "fifo")
    with pytest.raises(ValueError, match="capacity=1: 2 bytes are computed with at a time; pass at least that"):
        moved_bytes([("need", "a", 1), ("need", "b", 1)], 1)
