"""A plan as PyTorch would have recorded it, for `segment_map` and for PyTorch's memory viewer."""

from ...common.allocations import ALLOC
from ..simulated_snapshot import frames_of
from ..snapshot import Snapshot

FIRST = 2**21  # the arena's address


def snapshot_of(plan, trace):
    """Return the Snapshot of a program that made each block of `trace` at the address of `plan`, in one segment.

    `segment_map(caching=record(trace), planned=snapshot_of(plan, trace))` draws address × time before and after.
    """
    stream = {"stream": 0, "time_us": 0, "frames": []}
    entries = [{"action": "segment_alloc", "addr": FIRST, "size": plan.nbytes, **stream}]
    offsets, nbytes, live = plan.offsets.tolist(), trace.blocks["nbytes"].tolist(), {}
    for action, block, stream, time_ns in trace.events.tolist():
        frames = frames_of(trace.name_of(block), trace.category_of(block))
        entry = {"addr": FIRST + offsets[block], "size": nbytes[block], "stream": stream, "time_us": time_ns // 1000,
                 "frames": frames}
        if action == ALLOC:
            live[block] = entry
            entries.append({"action": "alloc", **entry})
        else:
            del live[block]
            entries += [{"action": "free_requested", **entry}, {"action": "free_completed", **entry}]
    return Snapshot([_segment(plan, live.values())], entries)


def _segment(plan, live):
    """Return the arena at the end as a snapshot has a segment: live blocks, and what is free between them."""
    blocks, at = [], FIRST
    for entry in [*sorted(live, key=lambda entry: entry["addr"]), {"addr": FIRST + plan.nbytes, "size": 0}]:
        if entry["addr"] > at:
            blocks.append({"address": at, "size": entry["addr"] - at, "requested_size": 0, "state": "inactive",
                           "frames": []})
        if entry["size"]:
            blocks.append({"address": entry["addr"], "size": entry["size"], "requested_size": entry["size"],
                           "state": "active_allocated", "frames": entry["frames"]})
        at = max(at, entry["addr"] + entry["size"])
    used = sum(entry["size"] for entry in live)
    return {"device": 0, "address": FIRST, "total_size": plan.nbytes, "allocated_size": used, "active_size": used,
            "requested_size": used, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [], "blocks": blocks}
