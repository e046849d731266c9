"""The recorded order: what is expected, when it is known, departures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.common import accesses as module
from refimpl.common.accesses import AccessRecording


def recorded(text, recording=None):
    recording = recording or AccessRecording()
    for key in text:
        recording.note(key, 1.0)
    return recording


def test_nothing_is_expected_before_anything_is_repeated():
    recording = recorded("abc")
    assert recording.step == [] and recording.expected() is None and recording.next_use("a") == float("inf")
    assert list(recording.coming()) == [] and recording.last_use("c") == 1 and recording.last_use("z") == float("inf")


def test_a_step_is_found_by_its_repetition_and_whole_when_all_of_it_was_repeated():
    recording = recorded("abcbaUVabc")
    assert "".join(recording.step) == "baUVabc" and not recording.whole
    assert recorded("baUV", recording).whole and "".join(recording.step) == "abcbaUV"
    assert [recording.next_use(key) for key in "abcUV"] == [0, 1, 2, 5, 6]
    assert recording.next_use("b", after=1) == 3 and recording.next_use("b", after=3) == 8
    assert list(recording.coming())[:2] == [(0, "a", 1.0), (1, "b", 2.0)]


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12), st.integers(0, 30))
def test_next_use_is_that_of_the_step_repeated_for_ever(step, after):
    recording = recorded(step * 4)
    future = recording.step * (after // len(recording.step) + 3)
    for key in "abcdef":
        found = next((d for d, each in enumerate(future) if each == key and d > after), float("inf"))
        assert recording.next_use(key, after) == found


def test_what_is_repeated_inside_a_step_is_not_taken_for_a_step():
    """Four micro-batches of gradients, then the update."""
    recording = recorded(("gh" * 4 + "UgVh") * 3)
    assert recording.whole and recording.departures == 0 and len(recording.step) == 12


def test_a_departure_is_counted_and_a_new_order_is_recorded():
    recording = recorded("abcd" * 3)
    recorded("ac", recording)
    assert recording.departures == 1 and recording.last_departure == ("b", "c") and not recording.whole
    recorded("bd" + "acbd" * 2, recording)
    assert recording.whole and "".join(recording.step) == "acbd" and recording.departures == 1


def test_a_key_that_never_came_before_is_no_departure_and_the_step_is_recorded_again():
    recording = recorded("ab" * 4 + "z")
    assert recording.departures == 0 and not recording.whole and recorded("abz" * 2, recording).whole


def test_a_long_training_is_not_remembered(monkeypatch):
    recording = recorded("abc" * 1000)
    assert len(recording.order) <= 12 and "".join(recording.step) == "abc"
    monkeypatch.setattr(module, "LONGEST", 50)
    recording = recorded(str(i) for i in range(1000))
    assert len(recording.order) <= 100


@pytest.mark.parametrize("text", ["aaaa", "abababab"])
def test_short_steps(text):
    assert recorded(text).whole
