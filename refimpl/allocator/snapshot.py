"""Memory snapshots of PyTorch: read without running what a pickle may hold, and written so that its viewer opens them.

    torch.cuda.memory._record_memory_history()
    train()
    torch.cuda.memory._dump_snapshot("snapshot.pickle")     →   Snapshot.load("snapshot.pickle")

A snapshot has the segments at its end, and one entry for each event of the recording, the oldest first:

    alloc, free_requested, free_completed       a block is given out; freed; no stream uses it any more
    segment_alloc, segment_free                 cudaMalloc and cudaFree
    segment_map, segment_unmap                  an expandable segment grows and shrinks
    oom                                         a request that failed

Sizes of alloc and free are those that were asked for. Names are those of torch 2.11 to 2.14.
"""

import dataclasses
import gzip
import pickle
import zlib
from functools import cached_property
from pathlib import Path

from .trace import DamagedTrace

EVENTS = ("alloc", "free_requested", "free_completed", "oom")
SEGMENT_EVENTS = {"segment_alloc": 1, "segment_free": -1, "segment_map": 1, "segment_unmap": -1}  # what is reserved
OTHERS = {"snapshot", "user_defined"}  # marks of the user's, without memory
LIVE = {"active_allocated", "active_awaiting_free", "active_pending_free"}  # states of a block; the last before 2.1
INT, TEXT = (int,), (str,)
SEGMENT_FIELDS = {"address": INT, "total_size": INT, "stream": INT, "segment_type": TEXT, "blocks": (list,)}
BLOCK_FIELDS = {"size": INT, "requested_size": INT, "state": TEXT}


@dataclasses.dataclass
class Snapshot:
    """What the allocator of one device recorded.

    - `segments`: at the end, a list of dicts: address, total_size, stream, segment_type, is_expandable, blocks.
    - `entries`: a list of dicts: action, addr, size, stream, time_us, frames.
    - `settings`: the text of PYTORCH_CUDA_ALLOC_CONF. `device`: its index. `resolved`: settings as PyTorch had them.
    """

    segments: list
    entries: list
    settings: str = ""
    device: int = 0
    resolved: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, path, device=None):
        """Read a file of `torch.cuda.memory._dump_snapshot`, of one device, by default the first that recorded. A file
        that is called .gz is unpacked.

        DamagedTrace, with the field, if it is no such file, was cut, or is of a version with other fields.
        """
        path = Path(path)
        with _open(path, "rb") as file:
            try:
                found = _Data(file).load()
            except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError, TypeError,
                    MemoryError, OverflowError, OSError, zlib.error) as error:
                raise DamagedTrace(f"{path} is not a whole file of torch.cuda.memory._dump_snapshot: "
                                   f"{error}") from error
        _check(found, str(path), {"segments": (list,), "device_traces": (list,)})
        traces = found["device_traces"]
        if device is None:
            device = next((i for i, entries in enumerate(traces) if entries), 0)
        if not 0 <= device < max(1, len(traces)):
            raise ValueError(f"device={device}: {path} has {len(traces)} devices")
        segments = [segment for segment in found["segments"] if segment.get("device", 0) == device]
        for i, segment in enumerate(segments):
            _check_segment(segment, f"{path}: segments[{i}]")
        entries = traces[device] if traces else []
        for i, entry in enumerate(entries):
            _check_entry(entry, f"{path}: device_traces[{device}][{i}]")
        resolved = dict(found.get("allocator_settings", {}))
        settings = resolved.pop("PYTORCH_CUDA_ALLOC_CONF", "")
        return cls(segments, [each for each in entries if each["action"] not in OTHERS], settings, device, resolved)

    def save(self, path):
        """Write a file as `torch.cuda.memory._dump_snapshot` does, for pytorch.org/memory_viz. Returns the Path. One
        that is called .gz is packed."""
        path = Path(path)
        with _open(path, "wb") as file:
            pickle.dump({"segments": self.segments, "device_traces": [*([] for _ in range(self.device)), self.entries],
                         "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.settings, **self.resolved},
                         "external_annotations": []},
                        file)
        return path

    @property
    def reserved(self):
        """Return the bytes of its segments, at its end."""
        return sum(segment["total_size"] for segment in self.segments)

    def owner_of(self, event):
        """Return the private pool that the entry `event` is about, (0, 0) if none. Before torch 2.13 entries do not say
        it: then it is that of the segment which has the address at the end, if it was there already."""
        entry = self.entries[event]
        if "pool_id" in entry:
            return tuple(entry["pool_id"])
        for segment, born in self._private:
            if born <= event and 0 <= entry.get("addr", -1) - segment["address"] < segment["total_size"]:
                return tuple(segment["segment_pool_id"])
        return 0, 0

    @cached_property
    def _private(self):
        """[(segment of a private pool at the end, the event that brought it)]."""
        came = {entry["addr"]: i for i, entry in enumerate(self.entries) if entry["action"] == "segment_alloc"}
        return [(each, came.get(each["address"], -1)) for each in self.segments
                if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0)]


def _open(path, mode):
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)


class _Data(pickle.Unpickler):
    """Reads dicts, lists, tuples, text and numbers; a pickle that asks for anything else is refused."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot is made of dicts, lists and numbers")


def _check(found, where, fields):
    if not isinstance(found, dict):
        raise DamagedTrace(f"{where} is a {type(found).__name__}: expected a dict with {', '.join(fields)}")
    for field, kinds in fields.items():
        if not isinstance(found.get(field), kinds):
            raise DamagedTrace(f"{where}.{field} is {found.get(field, 'missing')!r}: expected {kinds[0].__name__}, "
                               "as in snapshots of torch 2.1 and later")


def _check_segment(segment, where):
    _check(segment, where, SEGMENT_FIELDS)
    for i, block in enumerate(segment["blocks"]):
        _check(block, f"{where}.blocks[{i}]", BLOCK_FIELDS)
    inside = sum(block["size"] for block in segment["blocks"])
    if inside != segment["total_size"]:
        raise DamagedTrace(f"{where}.blocks have {inside} bytes, its total_size is {segment['total_size']}")


def _check_entry(entry, where):
    _check(entry, where, {"action": TEXT})
    action = entry["action"]
    if action in OTHERS:
        return
    if action not in (*EVENTS, *SEGMENT_EVENTS):
        raise DamagedTrace(f"{where}.action is {action!r}: expected {', '.join((*EVENTS, *SEGMENT_EVENTS))}")
    _check(entry, where, {"device_free" if action == "oom" else "addr": INT, "size": INT, "stream": INT})
