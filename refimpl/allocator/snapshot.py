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
from typing import TYPE_CHECKING, Any, Self

from ..common.allocations import DamagedTrace
from ..untrusted.files import opened
from .fields import (  # noqa: F401 - others read the names of events here
    EVENTS,
    OTHERS,
    SEGMENT_EVENTS,
    check_apart,
    check_entry,
    check_list,
    check_segment,
    check_whole,
)
from .unpickled import load

if TYPE_CHECKING:
    from os import PathLike

LIVE = {"active_allocated", "active_awaiting_free", "active_pending_free"}  # states of a block; the last before 2.1
LIMIT, UNPACKED = 2**30, 2**26  # bytes of a file, and of what one that is packed holds


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
    def load(cls, path: "str | PathLike[str]", device: int | None = None) -> Self:
        """Read a file of `torch.cuda.memory._dump_snapshot`, of one device, by default the first that recorded. A file
        that is called .gz is unpacked.

        DamagedTrace, with the field, if it is no such file, was cut, or is of a version with other fields.
        """
        path = Path(path)
        try:
            found = load(_read(path))
        except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError, TypeError,
                MemoryError, OverflowError, RecursionError, gzip.BadGzipFile, zlib.error) as error:
            raise DamagedTrace(f"{path} is not a whole file of torch.cuda.memory._dump_snapshot: {error}") from error
        check_whole(found, str(path))
        traces, seen = found["device_traces"], set()
        if device is None:
            device = next((i for i, entries in enumerate(traces) if entries), 0)
        if not 0 <= device < max(1, len(traces)):  # a snapshot without any event has no device
            raise ValueError(f"device={device}: {path} has {len(traces)} devices")
        for i, segment in enumerate(found["segments"]):
            check_segment(segment, f"{path}: segments[{i}]", seen)
        segments = [segment for segment in found["segments"] if segment.get("device", 0) == device]
        check_apart(segments, path)
        entries = traces[device] if traces else []
        check_list(entries, f"{path}: device_traces[{device}]")
        for i, entry in enumerate(entries):
            check_entry(entry, f"{path}: device_traces[{device}][{i}]", seen)
        resolved = dict(found.get("allocator_settings", {}))
        settings = resolved.pop("PYTORCH_CUDA_ALLOC_CONF", "")
        return cls(segments, [each for each in entries if each["action"] not in OTHERS], settings, device, resolved)

    def save(self, path: "str | PathLike[str]") -> Path:
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
    def reserved(self) -> int:
        """Return the bytes of its segments, at its end."""
        return sum(segment["total_size"] for segment in self.segments)

    def owner_of(self, event: Any) -> tuple[int, int]:
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
        """List [(segment of a private pool at the end, the event that brought it)]."""
        came = {entry["addr"]: i for i, entry in enumerate(self.entries) if entry["action"] == "segment_alloc"}
        return [(each, came.get(each["address"], -1)) for each in self.segments
                if tuple(each.get("segment_pool_id", (0, 0))) != (0, 0)]


def _open(path, mode):
    return gzip.open(path, mode) if path.suffix == ".gz" else path.open(mode)


def _read(path):
    """Return the bytes of a file, unpacked."""
    with opened(path, LIMIT) as file:
        if path.suffix != ".gz":
            return file.read()
        with gzip.GzipFile(fileobj=file) as packed:
            data = packed.read(UNPACKED + 1)
    if len(data) > UNPACKED:
        raise ValueError(f"it holds more than {UNPACKED:,} bytes when it is unpacked: unpack it, if you trust it")
    return data
