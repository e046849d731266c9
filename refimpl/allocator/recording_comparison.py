"""Replay a recording of PyTorch's own allocator, and compare every address and every segment.

The only thing that is taken from the recording is where cudaMalloc put a segment, and when it had no memory.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .caching import CachingAllocator
from .device import OutOfMemory
from .recording_start import restore, rewind
from .settings import SMALL, Settings
from .snapshot import SEGMENT_EVENTS

if TYPE_CHECKING:
    from .snapshot import Snapshot


class Differs(Exception):
    """Raised within a replay at its first difference from the recording."""


class RecordedDevice:
    """Gives the addresses that a recording has, in its order. It has no memory where the recording shows no segment.

    `expected`: what the recording does next, a deque of (action, address, bytes).
    """

    def __init__(self, capacity):
        self.capacity, self.expected, self.checked = capacity, deque(), 0

    def _next(self, action):
        return self.expected[0][1:] if self.expected and self.expected[0][0] == action else (None, None)

    def _expect(self, *event):
        self.checked += 1
        if not self.expected or self.expected[0] != event:
            theirs = "{0} of {2} bytes at {1:#x}".format(*self.expected[0]) if self.expected else "nothing of the kind"
            raise Differs("{0} of {2} bytes at {1:#x}, recorded: ".format(*event) + theirs)
        self.expected.popleft()

    def expands(self, owner):
        """Tell whether the segment that comes next is expandable."""
        return owner == (0, 0) or self._next("segment_alloc")[0] is None

    def malloc(self, nbytes):
        """Return the recorded address of the next segment; None if memory is given back first."""
        address, _ = self._next("segment_alloc")
        if address is not None:
            self._expect("segment_alloc", address, nbytes)
        return address

    def free(self, address, nbytes):
        """Take a segment back, as recorded."""
        self._expect("segment_free", address, nbytes)

    def reserve(self, nbytes):
        """Return where the next piece of memory goes, though other memory may be given back before."""
        # the address that a driver chose cannot be computed
        return next((address for action, address, _ in self.expected if action == "segment_map"), 0)

    def unreserve(self, address):
        """Take addresses back; that is not recorded."""

    def map(self, address, nbytes):
        """Give memory to these addresses, as recorded; None if memory is given back first, or there is none."""
        if self._next("segment_map")[0] is None:
            return None
        self._expect("segment_map", address, nbytes)
        return True

    def unmap(self, address, nbytes):
        """Take the memory of these addresses back, as recorded."""
        self._expect("segment_unmap", address, nbytes)


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


def compare(snapshot: "Snapshot", settings: Any = None, capacity: int = 2**46) -> Any:
    """Replay a snapshot's recording on a CachingAllocator: a Comparison with PyTorch's own addresses and segments.

    `settings`: a Settings, by default what the snapshot says. A memory fraction is not in it, nor the device's
    `capacity` in bytes: give them if `garbage_collection_threshold` is set.
    """
    settings = Settings.of(snapshot) if settings is None else settings
    device = RecordedDevice(capacity)
    allocator = CachingAllocator(settings=settings, device=device)
    start = rewind(snapshot, settings)
    live, addresses, event = restore(allocator, start), 0, 0
    try:
        for event, entry in enumerate(snapshot.entries):
            action, at, size = entry["action"], entry.get("addr"), entry["size"]
            if action in SEGMENT_EVENTS:
                device.expected.append((action, at, size))
            elif action in ("alloc", "oom"):
                block = _allocate(allocator, entry, snapshot.owner_of(event))
                if block is not None:
                    live[block.address] = block
                    addresses += 1
            elif action == "free_completed":
                _given_back(allocator)
                allocator.free(live.pop(at))  # free_requested alone leaves it to its streams
        _given_back(allocator)
    except Differs as difference:
        return Comparison(addresses, device.checked, str(difference), event)
    return Comparison(addresses, device.checked)


def _allocate(allocator, entry, owner):
    """Return the Block for an entry, or None if it fails as recorded."""
    _pools_gone(allocator, but=owner)
    device, size, stream = allocator.device, allocator.settings.rounded(entry["size"]), entry["stream"]
    _learn_order(allocator, _largest_first(allocator, size, stream, owner))
    grows = any(event[0] in ("segment_alloc", "segment_map") for event in device.expected)
    if device.expected and (not grows or _would_fit(allocator, size, stream, owner) or _all_goes(allocator)):
        _given_back(allocator, until=grows)
    _learn_ages(allocator, entry, size, stream, owner)
    # A private pool may be that of a graph that is being captured, which no entry says.
    allocator.capturing = entry["action"] == "oom" and not device.expected and len(allocator.pools) > 2
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


def _learn_ages(allocator, entry, size, stream, owner):
    """Learn which segments are older, of those that were there before the recording: of two free blocks of equal size
    that is taken which is in the older one, and equal segments go back in this order."""
    pool = allocator.pools.get((size <= SMALL, owner))
    first = None if pool is None else next(pool.at_least(stream, size), None)
    theirs = pool and pool.at(entry.get("addr"))
    if first and theirs and theirs is not first and theirs.size == first.size and max(theirs.born, first.born) <= 0:
        _is_the_oldest(allocator, theirs)


def _learn_order(allocator, from_size=math.inf):
    """Learn the order of age from the segments that the recording gives back. `from_size`: blocks of this size and more
    go back the largest and youngest first."""
    blocks = [block for action, address, _ in allocator.device.expected if action == "segment_free"
              for pool in allocator.pools.values() if (block := pool.at(address)) is not None and block.born <= 0]
    small, large = ([block for block in blocks if (block.size >= from_size) is of] for of in (False, True))
    for block in (*reversed(small), *large):
        _is_the_oldest(allocator, block)


def _largest_first(allocator, size, stream, owner):
    """Return from which size on segments go back the largest and youngest first for a request: `max_split_size`, if
    none is as large as the request; else infinity."""
    least, pool = allocator.settings.max_split_size, allocator.pools.get((size <= SMALL, owner))
    several = least is not None and pool is not None and next(pool.at_least(stream, max(size, least)), None) is None
    return least if several else math.inf


def _is_the_oldest(allocator, block):
    allocator.oldest -= 1
    while block.before is not None:
        block = block.before
    while block is not None:
        block.pool.grow_old(block, allocator.oldest)
        block = block.after


def _would_fit(allocator, size, stream, owner):
    pool = allocator.pools.get((size <= SMALL, owner))
    fit = None if pool is None else next(pool.at_least(stream, size), None)
    return fit is not None and allocator.settings.serves(fit.size, size)


def _all_goes(allocator):
    """Tell whether the recording gives back what `empty_cache` would, in its order, as it does before a capture."""
    freed = [address for action, address, _ in allocator.device.expected if action == "segment_free"]
    return freed == [block.address for block in allocator.unused() if block.segment is None]


def _given_back(allocator, until=False):
    """Empty the cache if the recording gives segments back that no request needed: its program did so."""
    expected = allocator.device.expected
    _pools_gone(allocator)
    _learn_order(allocator)
    if expected and expected[0][0] in ("segment_free", "segment_unmap"):
        allocator.empty_cache()
    if expected and not until:
        raise Differs("nothing, recorded: {0} of {2} bytes at {1:#x}".format(*expected[0]))


def _pools_gone(allocator, but=None):
    """Release private pools whose free memory the recording gives back: their graph or MemPool is gone. It went just
    now if that memory comes first, earlier if other memory does. `but`: the pool of a request, which is in use."""
    expected, given_back = allocator.device.expected, ("segment_free", "segment_unmap")
    while expected and expected[0][0] in given_back and (owner := _owner_of(allocator, expected[0][1], but)):
        allocator.release_pool(owner)
    later = {_owner_of(allocator, address, but) for action, address, _ in expected if action in given_back}
    allocator.gone |= later - {None}


def _owner_of(allocator, address, but):
    """Return the private pool other than `but` that has a free block with this address; None if none has."""
    return next((pool.owner for pool in allocator.pools.values() if pool.owner not in ((0, 0), but) and any(
        block.address <= address < block.end for block in pool)), None)
