"""Snapshots as PyTorch writes them: read without running code, damaged ones named by field; and PyTorch opens ours."""

import copy
import os
import pickle

import pytest
import torch
from allocator_kit import random_trace
from torch.cuda import _memory_viz

from refimpl.allocator import (
    AllocationTrace,
    DamagedTrace,
    Snapshot,
    capacity_of,
    record,
    replay,
    trace_of,
)
from refimpl.allocator.settings import MIB


@pytest.fixture(scope="module")
def snapshot():
    return record(random_trace(600, streams=2), settings="expandable_segments:True")


class Bomb:
    """Runs a command when it is unpickled."""
    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_a_file_is_as_it_was(snapshot, tmp_path):
    again = Snapshot.load(snapshot.save(tmp_path / "s.pickle"))
    assert (again.entries, again.segments) == (snapshot.entries, snapshot.segments)
    assert again.settings == "expandable_segments:True" and again.device == 0


def test_no_code_of_a_file_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for thing in (Bomb(), {"segments": [Bomb()], "device_traces": []}, torch.zeros(2)):
        (tmp_path / "s.pickle").write_bytes(pickle.dumps(thing))
        with pytest.raises(DamagedTrace, match=r"it asks for (posix\.mkdir|torch)"):
            Snapshot.load("s.pickle")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("change", "message"), [
    (lambda s: s.pop("segments"), r"s\.pickle\.segments is 'missing': expected list"),
    (lambda s: s.update(device_traces=3), r"\.device_traces is 3: expected list"),
    (lambda s: s["segments"][1].pop("total_size"), r"segments\[1\]\.total_size is 'missing': expected int"),
    (lambda s: s["segments"][0]["blocks"][1].pop("requested_size"), r"segments\[0\]\.blocks\[1\]\.requested_size"),
    (lambda s: s["segments"][0].update(total_size=7), r"segments\[0\]\.blocks have \d+ bytes, its total_size is 7"),
    (lambda s: s["device_traces"][0][5].pop("action"), r"device_traces\[0\]\[5\]\.action is 'missing'"),
    (lambda s: s["device_traces"][0][5].update(action="malloc"), r"\[5\]\.action is 'malloc': expected alloc,"),
    (lambda s: s["device_traces"][0][5].update(addr="0x1"), r"\[5\]\.addr is '0x1': expected int"),
    (lambda s: s["device_traces"].__setitem__(0, [3]), r"device_traces\[0\]\[0\] is a int: expected a dict")])
def test_a_damaged_field_is_named(snapshot, tmp_path, change, message):
    found = {"segments": copy.deepcopy(snapshot.segments), "device_traces": [copy.deepcopy(snapshot.entries)]}
    change(found)
    (tmp_path / "s.pickle").write_bytes(pickle.dumps(found))
    with pytest.raises(DamagedTrace, match=message):
        Snapshot.load(tmp_path / "s.pickle")


def test_a_pool_that_is_no_pair_of_ints_is_named(snapshot, tmp_path):
    found = pickle.loads(snapshot.save(tmp_path / "s.pickle").read_bytes())
    for pool in ([0], [0, 0, 0], ["0", 0], 3, "00", {0: 0, 1: 0}):
        found["device_traces"][0][0]["pool_id"] = pool
        (tmp_path / "s.pickle").write_bytes(pickle.dumps(found))
        with pytest.raises(DamagedTrace, match=r"device_traces\[0\]\[0\]\.pool_id is .*: expected pair of ints"):
            Snapshot.load(tmp_path / "s.pickle")


def test_a_file_that_was_cut(snapshot, tmp_path):
    path = snapshot.save(tmp_path / "s.pickle")
    data = path.read_bytes()
    for size in (0, 1, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(DamagedTrace, match="is not a whole file of torch.cuda.memory._dump_snapshot"):
            Snapshot.load(path)


def test_devices(snapshot, tmp_path):
    second = Snapshot([{**segment, "device": 1} for segment in snapshot.segments], snapshot.entries, device=1)
    path = second.save(tmp_path / "s.pickle")
    assert Snapshot.load(path).device == 1 and Snapshot.load(path, 1).entries == snapshot.entries
    assert Snapshot.load(path, 0).entries == Snapshot.load(path, 0).segments == []
    with pytest.raises(ValueError, match="device=2: .* has 2 devices"):
        Snapshot.load(path, 2)


def test_the_viewer_of_pytorch_opens_it(snapshot, tmp_path):
    data = pickle.loads(snapshot.save(tmp_path / "s.pickle").read_bytes())
    live = sum(block["state"] == "active_allocated" for segment in data["segments"] for block in segment["blocks"])
    assert _memory_viz.trace(data).count("segment_map") == sum(e["action"] == "segment_map" for e in snapshot.entries)
    assert "op 3" in _memory_viz.memory(data, format_flamegraph=lambda text: text)
    lines = _memory_viz.segments(data, format_flamegraph=lambda text: text).splitlines()
    assert sum(int(line.split()[-1]) for line in lines) == snapshot.reserved and live
    for page in (_memory_viz.trace_plot(data), _memory_viz.segment_plot(data)):
        assert "add_local_files" in page and len(page) > 10_000


def test_a_trace_of_a_snapshot_asks_for_the_same(snapshot):
    trace, again = random_trace(600, streams=2), trace_of(snapshot)
    assert (again.live_bytes == trace.live_bytes).all() and again.names == trace.names
    assert all((again.events[field] == trace.events[field]).all() for field in ("stream", "time_ns"))


def test_names_are_the_users_lines():
    frames = [{"filename": file, "line": line, "name": name} for file, line, name in (
        ("??", 0, "malloc"), ("/x/site-packages/torch/nn/functional.py", 3, "linear"),
        ("/home/me/model.py", 12, "forward"), ("/home/me/train.py", 5, "<module>"))]
    where = {"addr": 2**40, "size": 100, "stream": 0, "time_us": 7}
    segment = {"address": 2**40, "total_size": 2 * MIB, "stream": 0, "segment_type": "small", "blocks": [
        {"size": 2 * MIB, "requested_size": 0, "state": "inactive"}]}
    snapshot = Snapshot([segment], [
        {"action": "alloc", **where, "frames": frames, "user_metadata": "batch 3"},
        {"action": "free_requested", **where, "frames": []}, {"action": "free_completed", **where, "frames": []}])
    trace = trace_of(snapshot)
    assert (trace.name_of(0), trace.category_of(0)) == ("model.py:12 forward", "batch 3")
    assert trace.events["time_ns"].tolist() == [7000, 7000]


def test_a_request_that_failed_is_in_the_trace():
    snapshot = record(random_trace(3000), capacity=500 * MIB)
    fails = [entry for entry in snapshot.entries if entry["action"] == "oom"]
    assert fails and 0 < capacity_of(snapshot) <= 500 * MIB and capacity_of(record(random_trace(30))) is None
    found = replay(trace_of(snapshot), capacity=capacity_of(snapshot))
    assert found.failure.nbytes == fails[0]["size"], "the same request fails"
    assert isinstance(found.trace, AllocationTrace)
