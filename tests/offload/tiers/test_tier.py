"""Room in a tier."""

from refimpl.offload.tiers.tier import Tier


def test_room_is_taken_at_once_or_after_what_leaves():
    tier = Tier("host", 100)
    assert tier.allocate(60) == [] and tier.used == 60 == tier.peak
    tier.free(40, "first")
    tier.free(20, "second")
    assert tier.room == 100 and tier.used == 0
    assert tier.allocate(30) == [] and tier.allocate(30) == ["first"]  # 10 were free, and 40 came with the first
    assert tier.allocate(20) == [] and tier.allocate(20) == ["second"] and tier.room == 0 and tier.peak == 100


def test_room_that_is_given_back_is_free_now():
    tier = Tier("host", 10)
    tier.allocate(10)
    tier.free(10)
    assert tier.allocate(10) == []
    tier.grow(5)
    assert tier.capacity == 15 and tier.room == 5
