"""The file for PyTorch's memory viewer: read back by the allocator's reader and by torch's own tools."""

import base64
import json
import pickle
import re

import pytest
import torch
from torch.cuda import _memory_viz

from refimpl import memory
from refimpl.allocator.snapshot import Snapshot
from refimpl.memory.memory_viz import Addresses


def test_the_viewers_file_holds_the_timeline(trace, tmp_path):
    path = trace.export_snapshot(tmp_path / "t.pickle")
    snapshot, live, peak = Snapshot.load(path), {}, 0  # it refuses fields that torch would not write
    for entry in snapshot.entries:
        if entry["action"] == "alloc":
            begin, nbytes = entry["addr"], entry["size"]
            assert all(begin + nbytes <= other or begin >= other + size for other, size in live.items())
            live[begin] = nbytes
            peak = max(peak, sum(live.values()))
        elif entry["action"] == "free_completed":
            assert live.pop(entry["addr"]) == entry["size"]
    assert peak == trace.peak.total and sum(live.values()) == trace.now.total
    (segment,) = snapshot.segments
    assert {block["address"]: block["requested_size"] for block in segment["blocks"]
            if block["state"] == "active_allocated"} == live
    assert trace.peak.total <= segment["total_size"] < 1.2 * trace.peak.total  # addresses are used again
    frames = next(e["frames"] for e in snapshot.entries if e["frames"] and "gradient of blocks.1.mlp.up.weight" in
                  e["frames"][0]["name"])
    assert frames[1]["name"] == "blocks.1.mlp.up, made in backward" and len(frames) > 2
    assert frames[-1]["name"] == "loss = model(tokens, tokens)"
    assert {"unknown", "activations"} < {e.get("category") for e in snapshot.entries}
    found = pickle.loads(path.read_bytes())
    assert "segments: 1" in _memory_viz.segsum(found) and "cudaMalloc" in _memory_viz.trace(found)
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):  # pages of the viewer, with the file inside
        page = plot(found)
        (inside,) = json.loads(re.search(r"local_files = (.*)", page)[1])
        assert "MemoryViz" in page and pickle.loads(base64.b64decode(inside["base64"])) == found
    kept = _memory_viz.filter_alloc_free_pairs(pickle.loads(path.read_bytes()))["device_traces"][0]
    assert sum(entry["size"] for entry in kept if entry["action"] == "alloc") == trace.now.total


def entries_of(trace, folder):
    return Snapshot.load(trace.export_snapshot(folder / "t.pickle")).entries


def test_a_storage_that_is_resized_is_freed_and_taken_anew(tmp_path):
    with memory.track() as t:
        x = torch.zeros(1000)
        x.untyped_storage().resize_(0)
        x.untyped_storage().resize_(8000)
    whole, *entries = entries_of(t, tmp_path)
    assert (whole["action"], whole["time_us"]) == ("segment_alloc", t.began_ns // 1000)
    assert [(e["action"], e["size"]) for e in entries] == [
        ("alloc", 4000), ("free_requested", 4000), ("free_completed", 4000), ("alloc", 8000)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1)])
def test_holes_become_one(order):
    addresses = Addresses(0)
    blocks = [addresses.allocate(nbytes) for nbytes in (1, 512, 513)]
    assert blocks == [0, 512, 1024] and addresses.end == 2048
    for i in order:
        addresses.free(blocks[i], (1, 512, 513)[i])
    assert addresses.allocate(2048) == 0 and addresses.end == 2048 and addresses.allocate(1) == 2048


def test_a_parameter_is_made_in_building(tmp_path):
    with memory.track() as t:
        model = torch.nn.Linear(64, 64)
        model(torch.ones(2, 64)).sum().backward()
    frames = [entry["frames"] for entry in entries_of(t, tmp_path) if entry["frames"]]
    said = {tensor["name"].partition(" float32")[0]: where["name"] for tensor, where, *_ in frames}
    assert said["Linear.weight"] == "Linear, made in build"
    assert said["gradient of Linear.weight"] == "Linear, made in backward"
    assert {each.tensor: each.phase for each in t.held()}["Linear.weight"] == "build"
