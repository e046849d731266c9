"""Room in a tier."""

from refimpl.offload.tiers.tier import Tier


def test_room_is_taken_at_once_or_after_what_leaves():
    tier = Tier("host", 100)
    assert tier.take(60) == [] and tier.used == 60 == tier.peak
    tier.leave(40, "first")
    tier.leave(20, "second")
    assert tier.room == 100 and tier.used == 0
    assert tier.take(30) == [] and tier.take(30) == ["first"]  # 10 were free, and 40 came with the first
    assert tier.take(20) == [] and tier.take(20) == ["second"] and tier.room == 0 and tier.peak == 100


def test_room_that_is_given_back_is_free_now():
    tier = Tier("host", 10)
    tier.take(10)
    tier.leave(10)
    assert tier.take(10) == []
    tier.grow(5)
    assert tier.capacity == 15 and tier.room == 5
