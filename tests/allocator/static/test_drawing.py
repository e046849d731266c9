"""A plan as a snapshot: what a replay of it reads is the trace, and the map of both can be drawn."""

import matplotlib.pyplot as plt
import numpy as np
from allocator_kit import random_trace

from refimpl.allocator import Snapshot, plan_static, record, segment_map, trace_of
from refimpl.allocator.static import snapshot_of


def test_the_snapshot_of_a_plan_has_its_trace_and_its_addresses(tmp_path):
    trace = random_trace(300)
    plan = plan_static(trace)
    snapshot = snapshot_of(plan, trace)
    again = trace_of(Snapshot.load(snapshot.save(tmp_path / "plan.pickle")))
    assert np.array_equal(again.live_bytes[again.live_bytes > 0], trace.live_bytes[trace.live_bytes > 0])
    allocs = [entry for entry in snapshot.entries if entry["action"] == "alloc"]
    first = allocs[0]["addr"] - plan.offsets[trace.events["block"][0]]
    assert all(first <= entry["addr"] and entry["addr"] + entry["size"] <= first + plan.nbytes for entry in allocs)
    (segment,) = snapshot.segments
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"] == plan.nbytes
    assert segment["allocated_size"] == trace.live_bytes[-1]


def test_the_map_of_both():
    trace = random_trace(100)
    figure = segment_map(caching=record(trace), planned=snapshot_of(plan_static(trace), trace))
    assert figure.labels == ["caching", "planned"]
    plt.close("all")
