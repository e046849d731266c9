"""The simulator: seconds by hand, and bytes beside Belady's rule offline."""

import pytest

from refimpl.comm import Link
from refimpl.common.eviction import moved_bytes
from refimpl.offload.tiers.step_simulator import simulate

UNIT = 2**20
FAST = {link: Link(1e12) for link in ("in", "out", "disk")}


def in_order(order, seconds):
    """Each bucket in this order, the next one prefetched, as an engine asks: [(key, whether it is changed)]."""
    trace = []
    for (key, changed), (following, _) in zip(order, [*order[1:], (None, None)], strict=True):
        trace += [("need", key, UNIT, 0.0), *([("hint", following, UNIT, 0.0)] if following is not None else []),
                  ("changed" if changed else "same", key, UNIT, seconds)]
    return trace


def cycle(buckets, seconds):
    """An update."""
    return in_order([(key, True) for key in range(buckets)], seconds)


def there_and_back(buckets, seconds):
    """Read in turn, then in turn backwards, then updated: what stage 3 does with parameters."""
    return in_order([*((key, False) for key in (*range(buckets), *reversed(range(buckets - 1)))),
                     *((key, True) for key in range(1, buckets))], seconds)


def offline(trace, capacity):
    """A hint is a need that comes sooner."""
    plain = [("need" if what == "hint" else what, key, nbytes) for what, key, nbytes, _ in trace]
    return moved_bytes(plain, capacity, steps=28, first=8)


@pytest.mark.parametrize("trace", [cycle(20, 0.01), cycle(12, 0.01), there_and_back(12, 0.01)],
                         ids=["20 in turn", "12 in turn", "there and back"])
@pytest.mark.parametrize("device", [3, 5, 9])
def test_bytes_are_at_most_a_twentieth_above_beladys_rule_offline(trace, device):
    counts = simulate(trace, FAST, device * UNIT, 100 * UNIT, steps=28, first=8)
    best = offline(trace, device * UNIT)
    assert counts.bytes(target="device") <= 1.05 * best["loaded"]
    assert counts.bytes(source="device") <= 1.05 * best["evicted"]
    lru = simulate(trace, FAST, device * UNIT, 100 * UNIT, rule="lru", steps=28, first=8)
    assert lru.bytes(target="device") > counts.bytes(target="device") and lru.hits <= counts.hits


@pytest.mark.parametrize(("device", "host"), [(6, 8), (3, 12), (4, 4)])
def test_bytes_on_the_disk_too_with_one_bucket_of_host_memory_to_change_places_through(device, host):
    trace = cycle(20, 0.01)
    counts = simulate(trace, FAST, device * UNIT, host * UNIT, steps=28, first=8)
    best = offline(trace, (device + host - 1) * UNIT)
    assert counts.bytes(source="disk") <= 1.05 * best["loaded"]
    assert counts.bytes(target="disk") <= 1.05 * best["evicted"]


def test_what_arithmetic_says_can_be_hidden_is():
    """A bucket leaves (20 ms) while the one before it comes (20 ms), and each is computed with for 50 ms."""
    links = dict.fromkeys(("in", "out"), Link(UNIT / 0.02))
    counts = simulate(cycle(20, 0.05), links, 6 * UNIT, 100 * UNIT, steps=28, first=8)
    transfer = (counts.bytes(source="device") + counts.bytes(target="device")) / UNIT * 0.02
    assert transfer > 10 and counts.stalled < 0.1 * transfer


def test_what_cannot_be_hidden_is_what_the_link_takes_longer():
    """Nothing stays on the device, and the disk takes 60 ms for each bucket's way there and back, of which 10 are
    computed with."""
    counts = simulate(cycle(20, 0.01), {"disk": Link(UNIT / 0.03)}, 3 * UNIT, 0, steps=6)
    moved = (counts.bytes(source="disk") + counts.bytes(target="disk")) / UNIT * 0.03
    assert counts.seconds == pytest.approx(moved, rel=0.1)
    assert counts.stalled == pytest.approx(moved - 20 * 0.01, rel=0.1)


def test_a_slow_link_is_worth_another_load_for_fewer_stalls():
    """Look-ahead by the measured rate: two buckets on their way at a time where one alone would be waited for."""
    slow = dict.fromkeys(("in", "out"), Link(UNIT / 0.03))
    counts, quick = (simulate(cycle(20, 0.02), links, 10 * UNIT, 100 * UNIT, steps=28, first=8)
                     for links in (slow, FAST))
    assert 1.02 < counts.bytes(target="device") / quick.bytes(target="device") < 1.2
    assert counts.stalled < 0.2 * (quick.bytes(target="device") / UNIT * (2 * 0.03 - 0.02))


def test_unless_it_is_said_the_counts_are_those_of_the_fourth_step():
    def loaded(**steps):
        return simulate(cycle(20, 0.01), FAST, 9 * UNIT, 100 * UNIT, **steps).bytes(target="device") / UNIT

    assert loaded() == loaded(steps=4, first=3) == 13 and loaded(steps=8) == 11, "steps are not all alike"


def test_in_a_step_of_four_buckets_one_leaves_while_another_comes():
    """Either way takes as long as the computation with a bucket, so nobody waits."""
    links = dict.fromkeys(("in", "out"), Link(UNIT / 0.02))
    counts = simulate(cycle(4, 0.02), links, 3 * UNIT, 100 * UNIT, steps=28, first=8)
    assert counts.stalled == pytest.approx(0, abs=1e-6) and counts.bytes(target="device") > 0
