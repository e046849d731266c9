"""The timeline for PyTorch's memory viewer, pytorch.org/memory_viz: what `torch.cuda.memory._dump_snapshot` writes.

That file is a pickle of dicts, lists, text and numbers. Addresses are ours: the lowest hole that a storage fits in. The
viewer colours by category, and shows a tensor's name, module and lines as its stack.
"""

import pickle
from bisect import bisect_left
from pathlib import Path

from .top import module_of, phase_of, tensor_of

ALIGNMENT = 512  # as PyTorch's caching allocator has it


def export_snapshot(trace, path):
    """Write `trace`, on its device, to `path` for pytorch.org/memory_viz. Returns the Path.

    Storages from before the trace are allocated first; one that is resized is freed, and allocated anew. OSError if
    `path` cannot be written.
    """
    path = Path(path)
    with path.open("wb") as file:
        pickle.dump(snapshot_of(trace), file)
    return path


def snapshot_of(trace):
    """Return the dict that the file holds."""
    addresses, entries, live = Addresses(), [], {}
    categories, began = trace.categories(), trace.began_ns or 0
    for time_ns, i, nbytes in trace.lives():
        time_us = time_ns // 1000
        if nbytes < 0:
            gone = live.pop(i)
            addresses.free(gone["addr"], gone["size"])
            entries += [gone | {"action": done, "time_us": time_us} for done in ("free_requested", "free_completed")]
        else:
            live[i] = {"action": "alloc", "addr": addresses.allocate(nbytes), "size": nbytes, "stream": 0,
                       "time_us": time_us, "category": categories[i],
                       "frames": frames_of(trace, trace.records[i], categories[i])}
            entries.append(live[i])
    whole = {"action": "segment_alloc", "addr": addresses.begin, "size": addresses.end - addresses.begin, "stream": 0,
             "time_us": began // 1000, "category": "unknown", "frames": []}  # the viewer needs one that is unknown
    return {"segments": [_segment(addresses, live.values())], "device_traces": [[whole, *entries]],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": ""}, "external_annotations": []}


def frames_of(trace, record, category):
    """Return a stack that says whose a storage is: its tensor, its module, the library's line and the user's own."""
    kind = f" {record.dtype} {record.shape}" if record.dtype else ""
    where = f"{module_of(record) or '(none)'}, made in {phase_of(trace, record)}"
    frames = [{"filename": category, "line": 0, "name": tensor_of(record) + kind},
              {"filename": "module", "line": 0, "name": where}]
    for line in dict.fromkeys((record.source, record.line)):
        if line is not None:
            frames.append({"filename": line.file, "line": line.number, "name": line.text})
    return frames


def _segment(addresses, live):
    """Return the one segment, at the end: what is live in it, and the holes between."""
    blocks, at = [], addresses.begin
    for entry in sorted(live, key=lambda entry: entry["addr"]):
        blocks += _hole(at, entry["addr"])
        size = addresses.rounded(entry["size"])
        blocks.append({"address": entry["addr"], "size": size, "requested_size": entry["size"],
                       "state": "active_allocated", "frames": entry["frames"]})
        at = entry["addr"] + size
    blocks += _hole(at, addresses.end)
    active = sum(block["size"] for block in blocks if block["state"] == "active_allocated")
    requested = sum(block["requested_size"] for block in blocks)
    return {"device": 0, "address": addresses.begin, "total_size": addresses.end - addresses.begin, "stream": 0,
            "allocated_size": active, "active_size": active, "requested_size": requested, "segment_type": "large",
            "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks}


def _hole(begin, end):
    if end == begin:
        return []
    return [{"address": begin, "size": end - begin, "requested_size": 0, "state": "inactive", "frames": []}]


class Addresses:
    """Gives out addresses from `begin` to `end`, which grows: the lowest hole with room."""

    def __init__(self, begin=2**40):
        self.begin = self.end = begin
        self._holes = []  # (address, bytes), in order, none beside another

    @staticmethod
    def rounded(nbytes):
        """Return the bytes of the block for a request."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def allocate(self, nbytes):
        """Return the address of a block for `nbytes`."""
        size = self.rounded(nbytes)
        for i, (address, room) in enumerate(self._holes):
            if room >= size:
                self._holes[i:i + 1] = [(address + size, room - size)] if room > size else []
                return address
        self.end += size
        return self.end - size

    def free(self, address, nbytes):
        """Take back a block."""
        hole = address, self.rounded(nbytes)
        i = bisect_left(self._holes, hole)
        self._holes.insert(i, hole)
        for j in (i, i - 1):  # with the next, then with the one before
            if 0 <= j < len(self._holes) - 1 and sum(self._holes[j]) == self._holes[j + 1][0]:
                self._holes[j:j + 2] = [(self._holes[j][0], self._holes[j][1] + self._holes[j + 1][1])]
