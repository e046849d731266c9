"""What is said of one step: that memory fragments, and at which length a batch would not fit."""

from types import SimpleNamespace

import pytest

from refimpl.guard.sayings import Sayings

METER = SimpleNamespace(capacity=1000, name="cuda")


@pytest.fixture
def sayings(tmp_path):
    told = []
    found = Sayings(tmp_path, SimpleNamespace(known=SimpleNamespace(optimizers=())), told.append, None)
    found.told, found.every = told, 0
    return found


@pytest.mark.parametrize(("peak", "reserved", "is_said"), [(500, 790, True), (500, 740, False), (600, 790, False)])
def test_fragmentation_is_said_of_much_that_is_reserved_and_not_allocated(sayings, peak, reserved, is_said):
    sayings.look({"step": 1, "peak": peak, "rest": 10, "now": 5, "reserved": reserved}, METER, None)
    assert ["reserved 1.6 times allocated: fragmentation, see PYTORCH_ALLOC_CONF=expandable_segments:True"][
        :is_said] == sayings.told


def test_the_longest_batch_is_said_with_the_length_that_would_not_fit(sayings):
    for step, length in enumerate((10, 20, 30, 40), 1):  # 300 bytes are known, 0.375 L² are not
        rest = 3 * length**2 // 8
        sayings.look({"step": step, "peak": 300 + rest, "rest": rest, "now": 5}, METER, (2, length))
    assert sayings.told == ["step 4 had the longest batch so far (40): 900 B of 1,000 B; at 44 it would not fit"]


def test_one_sentence_of_a_kind_waits_for_its_minute(sayings):
    sayings.every = 60
    for words in ("first", "second", "third"):
        sayings.say(words, words)
    sayings.say("second", "the second again")
    assert sayings.told == ["first"]
    sayings.every = 0
    sayings.say("fourth", "fourth")
    sayings.say("fifth", "fifth")
    assert sayings.told == ["first", "second", "third"]
