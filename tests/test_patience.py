"""Seconds of a processor, as those of the machine where bounds were set."""

import patience
import pytest


@pytest.mark.parametrize(("times", "expected"), [(1, 6.0), (3, 2.0), (0.5, 6.0)], ids=["as fast", "slower", "faster"])
def test_a_slower_processor_s_seconds_count_for_less_and_a_faster_one_s_as_they_are(times, expected, monkeypatch):
    monkeypatch.setattr(patience, "yardstick", lambda: times * patience.REFERENCE)
    assert patience.processor_seconds(6.0) == pytest.approx(expected)


def test_a_bound_is_still_one():
    slow = patience.yardstick() / patience.REFERENCE
    with pytest.raises(patience.Late):
        patience.within(patience.processor_seconds(20 * max(1, slow)), 2)
