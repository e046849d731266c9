"""What moves where: capacities hold at any time, contents are never lost, nothing is moved that another tier has."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.comm import Link
from refimpl.offload.errors import StoreError
from refimpl.offload.tiers.bucket_moves import DEVICE, DISK, HOST, Counts
from refimpl.offload.tiers.placement import TierPlacement
from refimpl.offload.tiers.step_simulator import Clock

UNIT = 4096


class Checking(Clock):
    """A clock that also follows contents: `at[key, tier]` is the version that lies there when its move has ended."""

    def __init__(self, links=None):
        super().__init__(links or {})
        self.at, self.version = {}, {}

    def start(self, move):
        assert all(each.end is not None for each in move.after)  # started before: nothing can wait in a circle
        key = move.bucket.key
        assert (key, move.source) in self.at, f"{key} is moved from where it is not"
        super().start(move)
        self.at[key, move.target] = self.at[key, move.source]
        if move.source == DEVICE:
            del self.at[key, DEVICE]

    def free(self, bucket, tier):
        del self.at[bucket.key, tier]


class Driven:
    """A plan, and an engine that checks what it finds."""

    def __init__(self, device, host, disk=True, rule="belady", links=None):
        self.clock = Checking(links)
        self.plan = TierPlacement(self.clock, device, host, disk, rule)

    def rest(self, key, nbytes, changed=True):
        if changed:
            self.clock.version[key] = self.clock.version.get(key, 0) + 1
            self.clock.at.pop((key, DISK), None)
        self.clock.at[key, DEVICE] = self.clock.version[key]
        self.plan.end_use(key, nbytes, changed)
        self.check()

    def need(self, key):
        self.plan.need(key)
        assert self.clock.at[key, DEVICE] == self.clock.version[key], key
        self.check()

    def check(self):
        for tier in self.plan.tiers.values():
            assert 0 <= tier.used <= tier.capacity, tier.name
        for name, unit in ((DEVICE, lambda b: b.nbytes), (HOST, lambda b: b.host_bytes)):
            there = sum(unit(bucket) for bucket in self.plan.buckets.values() if name in bucket.where)
            assert there == self.plan.tiers[name].used
        assert all(bucket.where for bucket in self.plan.buckets.values())


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["belady", "lru"]), st.sampled_from([None, Link(1e6, 1e-3)]))
def test_contents_are_found_and_capacities_hold_whatever_is_asked(seed, rule, link):
    rng = random.Random(seed)
    sizes = [rng.randint(1, 4 * UNIT) for _ in range(rng.randint(2, 9))]
    driven = Driven(2 * max(sizes) + rng.randint(0, sum(sizes)), rng.randint(0, 12) * UNIT, rule=rule,
                    links=dict.fromkeys(("in", "out", "disk"), link) if link else {})
    step = [(rng.randrange(len(sizes)), rng.random() < 0.5, rng.random() < 0.5, rng.random() < 0.1)
            for _ in range(rng.randint(3, 15))]
    for _ in range(6):
        for key, changed, hints, drops in step:
            if rng.random() < 0.02:
                key = rng.randrange(len(sizes))  # a departure
            if key in driven.plan.buckets:
                driven.need(key)
            if hints:
                driven.plan.hint(rng.randrange(len(sizes)))
                driven.check()
            driven.clock.compute(rng.random() / 100)
            if drops and key in driven.plan.buckets:
                driven.plan.drop(key)
                for tier in (DEVICE, HOST, DISK):
                    driven.clock.at.pop((key, tier), None)
            else:
                driven.rest(key, sizes[key], changed or key not in driven.plan.buckets)


def cycle(driven, buckets, steps, hints=True):
    for key in range(buckets):
        driven.rest(key, UNIT)
    for step in range(steps):
        if step == steps - 1:
            driven.plan.counts = Counts()
        for key in range(buckets):
            driven.need(key)
            if hints and key + 1 < buckets:
                driven.plan.hint(key + 1)
            driven.clock.compute(0.01)
            driven.rest(key, UNIT)
    return driven.plan.counts


def test_what_fits_on_the_device_moves_nowhere():
    counts = cycle(Driven(5 * UNIT, 0, disk=False), 5, 3)
    assert counts.moved == {} and counts.hits == counts.accesses == 5 and counts.stalls == 0


def test_what_was_only_read_is_written_once():
    driven = Driven(2 * UNIT, 9 * UNIT)
    for key in range(5):
        driven.rest(key, UNIT)
    for _ in range(6):
        for key in range(5):
            driven.need(key)
            driven.rest(key, UNIT, changed=False)
    assert driven.plan.counts.bytes(target=HOST) <= 5 * UNIT  # each leaves once with its contents, and then without


def test_belady_hits_where_lru_never_does():
    ours, lru = (cycle(Driven(5 * UNIT, 20 * UNIT, rule=rule), 10, 12) for rule in ("belady", "lru"))
    assert lru.hits == 0 and lru.moved[HOST, DEVICE] == 10 * UNIT
    assert ours.hits >= 3 and ours.moved[HOST, DEVICE] <= 7 * UNIT


def test_the_disk_gets_what_host_memory_has_no_room_for():
    counts = cycle(Driven(2 * UNIT, 3 * UNIT), 10, 6)
    assert counts.bytes(source=DISK) and counts.bytes(source=HOST)
    none = cycle(Driven(2 * UNIT, 0), 10, 6)
    assert none.bytes(source=HOST) == 0 == none.bytes(target=HOST) and none.bytes(source=DISK) == 10 * UNIT


def test_a_bucket_that_is_needed_in_time_is_loaded_no_sooner():
    """One that is needed after long computation comes late, and without a stall."""
    counts = cycle(Driven(3 * UNIT, 20 * UNIT, links={"in": Link(UNIT / 0.01), "out": Link(UNIT / 0.01)}), 6, 8)
    assert counts.stalled < 0.02 * counts.accesses * 0.01 + 0.02


def test_capacities_that_cannot_hold_say_the_least_that_could():
    driven = Driven(2 * UNIT, 2 * UNIT, disk=False)
    with pytest.raises(StoreError, match=r"20,480 bytes do not fit .* pass at least host=16,384, or a folder"):
        for key in range(9):
            driven.rest(key, UNIT)
    driven = Driven(UNIT, 9 * UNIT)
    driven.rest(0, UNIT)
    driven.rest(1, UNIT)
    driven.need(0)
    with pytest.raises(StoreError, match="device=4,096 bytes: 1 buckets are computed with .* pass at least 8,192"):
        driven.need(1)


def test_auto_grows_to_what_is_computed_with_at_a_time():
    driven = Driven(None, 20 * UNIT)
    cycle(driven, 6, 3, hints=False)
    assert driven.plan.tiers[DEVICE].capacity == UNIT
