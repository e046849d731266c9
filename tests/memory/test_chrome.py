"""The exported file holds the timeline, in the format that Perfetto reads."""

import json

from refimpl import memory


def test_counters_are_the_timeline(trained, tmp_path):
    model, optimizer, step = trained
    with memory.track(model, optimizer) as t:
        step()
    path = t.export_chrome(tmp_path / "step.json")
    events = json.loads(path.read_text())["traceEvents"]
    counters = [event for event in events if event["ph"] == "C"]
    assert [memory.Ledger(event["args"]) for event in counters] == [moment.ledger for moment in t.timeline]
    times = [event["ts"] for event in counters]
    assert times == sorted(times) and times[0] == 0
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["forward", "backward", "step"]
    assert all(span["dur"] >= 0 for span in spans)


def test_ranks_are_told_apart(tmp_path):
    with memory.track() as t:
        pass
    path = memory.export_chrome(t, tmp_path / "rank3.json", name="rank 3", pid=3)
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {3}
    assert events[0] == {"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "rank 3 on cpu"}}
