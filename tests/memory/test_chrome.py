"""The exported file holds the timeline, in the format that Perfetto reads."""

import json

import pytest

from refimpl import memory
from refimpl.memory.trace import Op, StorageRecord, Trace

NAME = "gradient of blocks.1.mlp.up.weight"


def exported(path):
    """The events of a file, and those of its counters, spans, beginnings and ends."""
    events = json.loads(path.read_text())["traceEvents"]
    return events, *([event for event in events if event["ph"] == letter] for letter in "CXbe")


def test_counters_are_the_timeline(trace, tmp_path):
    _, counters, spans, begun, freed = exported(trace.export_chrome(tmp_path / "step.json"))
    assert [memory.Ledger(event["args"]) for event in counters] == [moment.ledger for moment in trace.timeline]
    times = [event["ts"] for event in counters]
    assert times == sorted(times) and times[0] == 0
    assert [span["name"] for span in spans] == ["forward", "backward", "step"]
    assert all(span["dur"] >= 0 for span in spans)
    begun, freed = ({event["id"]: event for event in found} for found in (begun, freed))
    assert len(begun) == len(freed) == 300 and all(begun[i]["ts"] <= freed[i]["ts"] for i in begun)
    (gradient,) = [event["args"] for event in begun.values() if event["name"].startswith(NAME)]
    assert gradient["bytes"] == 4 * 32 * 128 and gradient["module"] == "blocks.1.mlp.up"
    assert gradient["line"].startswith("tests/conftest.py:") and gradient["source"].startswith("refimpl/model.py:")


def test_ranks_are_told_apart(tmp_path):
    with memory.track() as t:
        pass
    events, *_ = exported(memory.export_chrome(t, tmp_path / "rank3.json", name="rank 3", pid=3))
    assert {event["pid"] for event in events} == {3}
    assert events[0] == {"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "rank 3 on cpu"}}


def by_hand():
    """Six milliseconds, in ns since 1970 as `time.time_ns` gives them: building, forward, backward; on two devices."""
    start = 1_700_000_000_000_000_000
    ops = [Op("a", "forward", "", start + 1_000_000), Op("b", "forward", "", start + 2_500_000),
           Op("c", "backward", "", start + 6_000_500)]
    records = [StorageRecord("cpu", "a", "forward", "", 0, 8), StorageRecord("cuda:0", "b", "forward", "", 1, 16)]
    return Trace(ops, records, [(0, 0, 8), (1, 1, 16)], first_call=1, began_ns=start)


@pytest.mark.parametrize(("device", "bytes_after"), [("cpu", [0, 8, 8, 8, 8]), ("cuda:0", [0, 0, 16, 16, 16])])
def test_times_are_microseconds_since_the_start_and_bytes_those_of_the_device(tmp_path, device, bytes_after):
    path = memory.export_chrome(by_hand().on(device), str(tmp_path / "hand.json"), name="m")
    assert path == tmp_path / "hand.json"
    (process, *events), counters, spans, begun, freed = exported(path)
    assert process == {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"m on {device}"}}
    assert [counter["ts"] for counter in counters] == [0, 1000, 2500, 6000.5, 6000.5]
    assert [sum(counter["args"].values()) for counter in counters] == bytes_after
    assert {(counter["name"], counter["pid"]) for counter in counters} == {("m", 0)}
    # A span lasts to the first operation of the next one: what it ended with is its own.
    assert spans == [
        {"name": name, "ph": "X", "ts": begin, "dur": lasts, "pid": 0, "tid": 0} for name, begin, lasts in (
            ("build", 0, 2500), ("forward", 2500, 3500.5), ("backward", 6000.5, 0))]
    assert [(e["name"], e["ts"], e["args"]["bytes"]) for e in begun] == [
        ("a", 1000, 8) if device == "cpu" else ("b", 2500, 16)]
    assert [(e["name"], e["ts"], e["id"]) for e in freed] == [(begun[0]["name"], 6000.5, begun[0]["id"])]
    assert len(events) == len(counters) + len(spans) + 2
    assert "displayTimeUnit" not in path.read_text()  # Perfetto 20 takes it for that of "ts", and shows 1 s as 1000


def test_a_storage_that_was_freed_ends_at_the_operation_that_freed_it(tmp_path):
    trace = by_hand()
    trace.events.append((1, 0, -8))
    *_, begun, freed = exported(trace.on("cpu").export_chrome(tmp_path / "hand.json"))
    assert [(e["name"], e["ts"]) for e in begun + freed] == [("a", 1000), ("a", 2500)]


def test_without_a_device_named_it_is_the_accelerator(tmp_path):
    (process, *_), *_ = exported(by_hand().export_chrome(tmp_path / "hand.json"))
    assert process["args"]["name"] == "memory on cuda:0"


def test_a_path_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        by_hand().export_chrome(tmp_path / "missing" / "hand.json")
