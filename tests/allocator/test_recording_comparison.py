"""Recordings replayed: every address and segment; from a late start; and another rule or constant is found."""

import random
from unittest import mock

import pytest
from allocator_kit import OTHER_CONSTANTS, OTHER_RULES, random_trace

from benchmarks.recordings import FOLDER, LIMIT, PROGRAMS
from refimpl.allocator import CachingAllocator, DamagedTrace, Snapshot, compare, record
from refimpl.allocator.recording_start import rewind
from refimpl.allocator.settings import MIB, Settings
from refimpl.allocator.simulated_snapshot import RecordingDevice, segments

SETTINGS = ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:4"]


@pytest.fixture(scope="module")
def recordings():
    """By settings and capacity, of 4,000 events on three streams."""
    return {(text, capacity): record(random_trace(4000, streams=3), settings=text, capacity=capacity)
            for text in SETTINGS for capacity in (None, 700 * MIB)}


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("capacity", [None, 700 * MIB])
def test_every_address_and_every_segment(recordings, text, capacity):
    snapshot = recordings[text, capacity]
    found, actions = compare(snapshot), [entry["action"] for entry in snapshot.entries]
    assert found.difference is None, repr(found)
    assert found.addresses == actions.count("alloc") and ("oom" in actions) is (capacity is not None)
    assert found.segments == sum(action.startswith("segment") for action in actions)


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("late", [1, 100, 101, 102, 103, 1500])
def test_a_recording_that_began_late(recordings, text, late):
    for capacity in (None, 700 * MIB):
        whole = recordings[text, capacity]
        found = compare(Snapshot(whole.segments, whole.entries[late:], text))
        assert found.difference is None, repr(found)


def test_a_recording_that_began_late_has_what_was_live(recordings):
    whole, live = recordings["", None], {}
    late = rewind(Snapshot(whole.segments, whole.entries[1000:]), Settings())
    early = rewind(Snapshot(whole.segments, whole.entries), Settings())
    for entry in whole.entries[:1000]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
        elif entry["action"] == "free_completed":
            del live[entry["addr"]]
    assert {at: block[0] for at, block in late.live.items()} == live and not early.live and not early.ranges


@pytest.mark.parametrize(("folder", "total"), [("nvidia-h200", 150_109_880_320), ("phantom-2.11.0", 80 * 2**30)])
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_pytorch_recorded(name, folder, total):
    """An H200 under torch 2.11, and the same torch on a device without kernels: every address and segment."""
    fraction = LIMIT / total if name.startswith("out_of_memory") or name == "collected" else None
    settings = Settings.parse(PROGRAMS[name][1], version="2.11.0", memory_fraction=fraction)
    found = compare(Snapshot.load(FOLDER / folder / f"{name}.pickle.gz"), settings, capacity=total)
    assert found.difference is None and found.addresses > 50, repr(found)


def test_a_program_that_empties_the_cache():
    """Segments go back though no request needs them."""
    device = RecordingDevice()
    allocator, dice, live = CachingAllocator(device=device), random.Random(0), []
    for i in range(400):
        if live and dice.random() < 0.5:
            block, nbytes = live.pop(dice.randrange(len(live)))
            device.note("free_completed", nbytes, block.address)
            allocator.free(block)
        else:
            nbytes = dice.randrange(1, 40 * MIB)
            live.append((allocator.allocate(nbytes), nbytes))
            device.note("alloc", nbytes, live[-1][0].address)
        if i % 50 == 49:
            allocator.empty_cache()
    emptied, actions = compare(Snapshot(segments(allocator), device.entries)), [e["action"] for e in device.entries]
    assert emptied.difference is None and "segment_free" in actions
    assert emptied.segments == sum(action.startswith("segment") for action in actions)


@pytest.mark.parametrize("rule", OTHER_RULES)
def test_another_rule_is_found(recordings, rule):
    with mock.patch.object(*OTHER_RULES[rule]):
        assert any(differs(snapshot) for snapshot in recordings.values())


@pytest.mark.parametrize("name", OTHER_CONSTANTS)
def test_another_constant_is_found(recordings, name):
    with mock.patch.object(*OTHER_CONSTANTS[name]):
        assert any(differs(snapshot) for snapshot in recordings.values())


def test_other_settings_are_found(recordings):
    for text in SETTINGS[1:]:
        assert differs(recordings["", None], Settings.parse(text)), text


def differs(snapshot, settings=None):
    """Whether a replay leaves the recording."""
    try:
        return compare(snapshot, settings).difference is not None
    except DamagedTrace:
        return True


def test_a_difference_is_named(recordings):
    snapshot = recordings["", None]
    entries = [dict(entry) for entry in snapshot.entries]
    at = next(i for i, entry in enumerate(entries) if entry["action"] == "alloc" and i > 500)
    entries[at]["addr"] += 512
    with pytest.raises(DamagedTrace, match=rf"event {at} takes \d+ bytes at 0x[0-9a-f]+, and nobody has them"):
        compare(Snapshot(snapshot.segments, entries))
    other = compare(snapshot, Settings.parse("roundup_power2_divisions:4"))
    assert f"then event {other.event}: " in repr(other) and "recorded: " in other.difference


@pytest.mark.parametrize(("drop", "message"), [
    ("alloc", "frees .* which are live afterwards|nobody has them"), ("free_completed", "nobody has them"),
    ("segment_alloc", "."), ("segment_free", ".")])
def test_events_that_are_missing_are_named(recordings, drop, message):
    snapshot = recordings["", 700 * MIB]
    entries = list(snapshot.entries)
    at = [i for i, entry in enumerate(entries) if entry["action"] == drop]
    del entries[at[len(at) // 2]]
    with pytest.raises(DamagedTrace, match=message):
        found = compare(Snapshot(snapshot.segments, entries))
        if found.difference is not None:
            raise DamagedTrace(found.difference)
