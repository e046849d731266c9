"""Replay a recording of PyTorch's own allocator, and compare every address and every segment.

The only thing that is taken from the recording is where cudaMalloc put a segment, and when it had no memory.
"""

from collections import deque
from dataclasses import dataclass

from .caching import CachingAllocator
from .device import OutOfMemory
from .rewind import restore, rewind
from .settings import SMALL, Settings
from .snapshot import SEGMENT_EVENTS


class Differs(Exception):
    """Raised within a replay at the first thing that the recording has otherwise."""


class RecordedDevice:
    """Gives the addresses that a recording has, in its order. It has no memory where the recording shows no segment.

    `expected`: what the recording does next, a deque of (action, address, bytes).
    """

    def __init__(self, capacity):
        self.capacity, self.expected, self.checked = capacity, deque(), 0

    def _next(self, action):
        return self.expected[0][1:] if self.expected and self.expected[0][0] == action else (None, None)

    def _take(self, *event):
        self.checked += 1
        if not self.expected or self.expected[0] != event:
            theirs = "{0} of {2} bytes at {1:#x}".format(*self.expected[0]) if self.expected else "nothing of the kind"
            raise Differs("{0} of {2} bytes at {1:#x}, recorded: ".format(*event) + theirs)
        self.expected.popleft()

    def malloc(self, nbytes):
        """Return the recorded address of the next segment; None if memory is given back first."""
        address, _ = self._next("segment_alloc")
        if address is not None:
            self._take("segment_alloc", address, nbytes)
        return address

    def free(self, address, nbytes):
        """Take a segment back, as recorded."""
        self._take("segment_free", address, nbytes)

    def reserve(self, nbytes):
        """Return where the next piece of memory goes."""
        return self._next("segment_map")[0] or 0

    def unreserve(self, address):
        """Take addresses back; that is not recorded."""

    def map(self, address, nbytes):
        """Give memory to these addresses, as recorded; None if memory is given back first, or there is none."""
        if self._next("segment_map")[0] is None:
            return None
        self._take("segment_map", address, nbytes)
        return True

    def unmap(self, address, nbytes):
        """Take the memory of these addresses back, as recorded."""
        self._take("segment_unmap", address, nbytes)


@dataclass
class Comparison:
    """`addresses` and `segments`: how many were as recorded. `difference`: the first that was not, None if all were;
    `event`: where."""

    addresses: int
    segments: int
    difference: str = None
    event: int = None

    def __repr__(self):
        text = f"{self.addresses:,} addresses and {self.segments:,} events of segments as recorded"
        return text if self.difference is None else f"{text}; then event {self.event}: {self.difference}"


def compare(snapshot, settings=None, capacity=2**46):
    """Replay a snapshot's recording on a CachingAllocator: a Comparison with PyTorch's own addresses and segments.

    `settings`: a Settings, by default what the snapshot says. A memory fraction is not in it, nor the device's
    `capacity` in bytes: give them if `garbage_collection_threshold` is set.
    """
    settings = Settings.parse(snapshot.settings) if settings is None else settings
    device = RecordedDevice(capacity)
    allocator = CachingAllocator(settings=settings, device=device)
    start = rewind(snapshot, settings)
    live, addresses, event = restore(allocator, start), 0, 0
    try:
        for event, entry in enumerate(snapshot.entries):  # noqa: B007 (said where it ended)
            action, at, size = entry["action"], entry.get("addr"), entry["size"]
            if action in SEGMENT_EVENTS:
                device.expected.append((action, at, size))
            elif action in ("alloc", "oom"):
                block = _allocate(allocator, entry, snapshot.owner_of(at))
                if block is not None:
                    live[block.address] = block
                    addresses += 1
            elif action == "free_completed":
                _given_back(allocator)
                allocator.free(live.pop(at))
        _given_back(allocator)
    except Differs as difference:
        return Comparison(addresses, device.checked, str(difference), event)
    return Comparison(addresses, device.checked)


def _allocate(allocator, entry, owner):
    """Return the Block for an entry, or None if it fails as recorded."""
    device, size, stream = allocator.device, allocator.settings.rounded(entry["size"]), entry["stream"]
    grows = any(event[0] in ("segment_alloc", "segment_map") for event in device.expected)
    if device.expected and (not grows or _would_fit(allocator, size, stream, owner)):
        _given_back(allocator, until=grows)
    try:
        block = allocator.allocate(entry["size"], stream, owner)
    except OutOfMemory:
        if entry["action"] == "oom":
            return None
        raise Differs(f"{entry['size']} bytes find no memory, recorded: {entry['addr']:#x}") from None
    if block.address != entry.get("addr"):
        theirs = "out of memory" if entry["action"] == "oom" else f"{entry['addr']:#x}"
        raise Differs(f"{entry['size']} bytes at {block.address:#x}, recorded: {theirs}")
    if device.expected:
        raise Differs("no new segment, recorded: {0} of {2} bytes at {1:#x}".format(*device.expected[0]))
    return block


def _would_fit(allocator, size, stream, owner):
    pool = allocator.pools.get((size <= SMALL, owner))
    fit = None if pool is None else next(pool.at_least(stream, size), None)
    return fit is not None and allocator.settings.serves(fit.size, size)


def _given_back(allocator, until=False):
    """If the recording gives segments back that no request made it give back, then its program emptied the cache."""
    expected = allocator.device.expected
    if expected and expected[0][0] in ("segment_free", "segment_unmap"):
        allocator.empty_cache()
    if expected and not until:
        raise Differs("nothing, recorded: {0} of {2} bytes at {1:#x}".format(*expected[0]))

