"""What is said of free memory in pieces is what a replay has shown."""

import pytest

from refimpl.guard.causes import causes
from refimpl.guard.failure import Facts
from refimpl.guard.known_bytes import KnownBytes


@pytest.mark.parametrize(("settings", "words"), [
    ({"expandable_segments:True": False, "max_split_size_mb:32": True}, "CONF=max_split_size_mb:32 lets this request"),
    ({"expandable_segments:True": False}, "none of the allocator's settings that were replayed lets"),
    ({}, "may keep free memory in one piece: it was not replayed")])
def test_a_setting_is_promised_where_a_replay_passed(settings, words):
    device = {"capacity": 1000, "allocated": 400, "reserved": 700, "free": 600, "largest free": 300, "by others": 0}
    facts = Facts(0, 1, 5, "forward", KnownBytes(), request=420, line="train.py:3", device=device, settings=settings)
    cause = next(each for each in causes(facts) if each.name == "fragmentation")
    assert words in cause.cure and cause.line == "train.py:3" and "largest piece has 300 B" in cause.what
    assert not [each for each in causes(Facts(**{**vars(facts), "request": 700})) if each.name == "fragmentation"]
