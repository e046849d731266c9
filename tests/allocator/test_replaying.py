"""Replays: what is reserved, what is lost where; why a request fails, and what would have helped."""

import time

import pytest
from allocator_kit import random_trace

from refimpl.allocator import CachingAllocator, Snapshot, explain, replay
from refimpl.allocator.settings import MIB
from refimpl.common.allocations import Maker


def grows(steps=5):
    """Each step has 4 MiB more of activations than the last, and keeps 60 MiB of them: a hole stays behind."""
    found = Maker()
    for i in range(steps):
        found.free(found.alloc((100 + 4 * i) * MIB, "activations", f"step {i}"))
        found.alloc(60 * MIB, "outputs", f"kept {i}")
    return found.trace()


def test_requested_internal_and_external_are_all_that_is_reserved():
    trace = random_trace(3000, streams=2)
    found = replay(trace)
    assert (found.requested + found.internal + found.external == found.reserved).all()
    assert (found.requested == trace.live_bytes).all() and (found.internal >= 0).all() and (found.external >= 0).all()
    assert found.peak == found.reserved.max() and found.internal.any() and found.external.any()
    assert "3,000 events: at most" in repr(found)


def test_why_a_request_fails():
    found = replay(grows(), capacity=450 * MIB)
    failure = found.failure
    assert failure.event == len(found.reserved) == 12 and failure.nbytes == failure.size == 116 * MIB
    assert failure.reserved == 424 * MIB and failure.free == 184 * MIB and failure.largest == 52 * MIB
    assert failure.neighbours == [("kept 3", "outputs", 60 * MIB)]
    for text in ("event 12 asks for 121,634,816 bytes", "the largest hole has 54,525,952", "kept 3"):
        assert text in str(failure)
    assert replay(grows(), capacity=600 * MIB).failure is None


def test_what_would_have_helped_is_tried():
    cures = explain(grows(), capacity=450 * MIB)
    assert "expandable_segments:True: goes on" in str(cures.failure)
    cures = cures.failure.cures
    assert cures["expandable_segments:True"] and cures["max_split_size_mb:32"] and not cures["max_split_size_mb:512"]
    for settings, helps in cures.items():
        if not settings.startswith("garbage"):
            assert (replay(grows(), capacity=450 * MIB, settings=settings, until=13).failure is None) is helps
    tight = explain(grows(), capacity=120 * MIB, settings="expandable_segments:True")
    assert tight.failure.cures and "expandable_segments:True" not in tight.failure.cures


def test_a_replay_ends_where_it_should():
    trace = random_trace(500)
    assert len(replay(trace, until=100).reserved) == 100
    with pytest.raises(ValueError, match="capacity 1,048,576 bytes: expected at least"):
        replay(trace, capacity=MIB)
    mine = CachingAllocator(10 * 2**30)
    assert replay(trace, mine).allocator is mine and mine.requested == trace.live_bytes[-1]


def test_what_is_no_trace_is_refused():
    for other in ("snapshot.pickle", Snapshot([], [])):
        with pytest.raises(TypeError, match=rf"trace is a {type(other).__name__}: .* trace_of\(Snapshot"):
            replay(other)


def test_a_million_events_in_20_seconds():
    trace = random_trace(1_000_000, live=4000, largest=23)
    began = time.process_time()
    replay(trace)
    assert time.process_time() - began < 20
