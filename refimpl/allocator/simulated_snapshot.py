"""Record what a CachingAllocator does with a trace: a snapshot as PyTorch's would be, for its memory viewer."""

from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from ..common.allocations import ALLOC
from .caching import CachingAllocator
from .device import OutOfMemory, VirtualDevice
from .settings import Settings
from .snapshot import Snapshot

if TYPE_CHECKING:
    from ..common.allocations import AllocationTrace


class RecordingDevice(VirtualDevice):
    """A VirtualDevice that writes down what it gives and takes: `entries`."""

    def __init__(self, capacity=None):
        super().__init__(capacity)
        self.entries, self.stream, self.time_ns = [], 0, 0
        self._streams = {}  # first of the addresses that were reserved → its stream

    def note(self, action, size, address, frames=(), stream=None):
        """Write an entry, of `stream` or of the one that asks."""
        where = {"device_free": self.capacity - self.used} if action == "oom" else {"addr": address}
        stream = self.stream if stream is None else stream
        self.entries.append({"action": action, **where, "size": size, "stream": stream,
                             "time_us": self.time_ns // 1000, "frames": list(frames), "pool_id": (0, 0)})

    def malloc(self, nbytes):
        """Return the address of a new segment, or None."""
        address = super().malloc(nbytes)
        if address is not None:
            self.note("segment_alloc", nbytes, address)
        return address

    def free(self, address, nbytes):
        """Take a segment back."""
        self.note("segment_free", nbytes, address, stream=self._stream_of(address))
        super().free(address, nbytes)

    def reserve(self, nbytes):
        """Return as many addresses, without memory."""
        address = super().reserve(nbytes)
        self._streams[address] = self.stream
        return address

    def _stream_of(self, address):
        return self._streams[self._taken[bisect_right(self._taken, (address + 1,)) - 1][0]]

    def map(self, address, nbytes):
        """Give memory to these addresses; returns True, or None if there is too little."""
        given = super().map(address, nbytes)
        if given and address is not None:  # malloc asks map without addresses: that is no event
            self.note("segment_map", nbytes, address)
        return given

    def unmap(self, address, nbytes):
        """Take the memory of these addresses back."""
        super().unmap(address, nbytes)
        self.note("segment_unmap", nbytes, address, stream=self._stream_of(address))


def record(trace: "AllocationTrace", *, capacity: int | None = None, settings: Any = None) -> Snapshot:
    """Run an AllocationTrace on a CachingAllocator, and return the Snapshot that PyTorch would have recorded of it.

    A request that fails is there as `oom`, and the recording goes on without it. `settings`: the text of
    PYTORCH_CUDA_ALLOC_CONF. The frame of a block is its name, and its line its category.
    """
    device, live = RecordingDevice(capacity), {}
    allocator = CachingAllocator(settings=Settings.parse(settings or ""), device=device)
    for action, number, stream, time_ns in trace.events.tolist():
        device.stream, device.time_ns = stream, time_ns
        nbytes = int(trace.blocks["nbytes"][number])
        if action == ALLOC:
            frames = frames_of(trace.name_of(number), trace.category_of(number))
            try:
                live[number] = allocator.allocate(nbytes, stream), frames  # notes the segments that it takes
            except OutOfMemory:
                device.note("oom", nbytes, None, frames)
            else:
                device.note("alloc", nbytes, live[number][0].address, frames)
        elif number in live:
            block, frames = live.pop(number)
            device.note("free_requested", nbytes, block.address, frames)
            device.note("free_completed", nbytes, block.address, frames)
            allocator.free(block)
    frames = {block.address: frames for block, frames in live.values()}
    return Snapshot(segments(allocator, frames), device.entries, settings or "")


def segments(allocator, frames=None):
    """Return the segments of a CachingAllocator as a snapshot has them, by address: a list of dicts."""
    free = [block for pool in allocator.pools.values() for block in pool]
    blocks = sorted([*free, *allocator.live.values()], key=lambda block: block.address)
    found = []
    for block in blocks:
        if block.before is None or not block.before.mapped:  # memory begins here: a segment of its own in a snapshot
            small, owner = block.pool.small, block.pool.owner
            found.append({"device": 0, "address": block.address, "total_size": 0, "allocated_size": 0,
                          "active_size": 0, "requested_size": 0, "stream": block.stream,
                          "segment_type": "small" if small else "large", "segment_pool_id": owner,
                          "is_expandable": block.segment is not None, "frames": [], "blocks": []})
        segment, size, live = found[-1], block.size, not block.free
        for name, value in (("total_size", size), ("allocated_size", size * live), ("active_size", size * live),
                            ("requested_size", block.requested)):
            segment[name] += value
        segment["blocks"].append({"address": block.address, "size": size, "requested_size": block.requested,
                                  "state": "active_allocated" if live else "inactive",
                                  "frames": (frames or {}).get(block.address, [])})
    return found


def frames_of(name, category):
    """Return the frames of a block: its name, and as its file the category."""
    return [{"filename": category, "line": 0, "name": name}] if name or category else []
