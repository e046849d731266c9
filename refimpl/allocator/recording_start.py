"""What was live when a recording began: the segments at its end, with every event undone, the last first.

A recording that began late, or of which only the last events were kept, has blocks that it never took. They are in the
segments at its end, or are freed meanwhile; and so is every segment.

Where a block that was there before is freed meanwhile, its size is known as it was asked for. What lies behind it is
its own if the allocator would not have cut it off, or if a later block begins behind that while it is live. What no
event tells: whether a hole of more than 1 MiB behind it begins with a rest that is its own. So a replay from such a
start may differ in an address; one from the beginning may not.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..common.allocations import DamagedTrace, Maker
from . import expandable
from .blocks import Block
from .settings import SMALL, SMALL_SEGMENT, Settings
from .snapshot import LIVE, SEGMENT_EVENTS

if TYPE_CHECKING:
    from ..common.allocations import AllocationTrace
    from .snapshot import Snapshot


@dataclass
class Range:
    """Bytes `address` … `end` − 1 with memory: a segment, or a part of an expandable one."""

    address: int
    end: int
    stream: int
    expandable: bool = False
    small: bool = False
    owner: tuple = (0, 0)
    segment: dict = None  # the segment at the end that it is of, None if it is gone by then


@dataclass
class RecordingStart:
    """When a recording began: `ranges`, sorted by address; `live`: {address: (bytes asked for, size or None, stream,
    frames)}; `bases`: {(stream, small, owner): first address of its expandable segment}."""

    ranges: list
    live: dict = field(default_factory=dict)
    bases: dict = field(default_factory=dict)


def rewind(snapshot, settings):
    """Return the RecordingStart of a snapshot. DamagedTrace, with the event, if an event cannot be undone."""
    live, ranges = {}, {}
    for segment in snapshot.segments:
        at = segment["address"]
        ranges[at] = Range(at, at + segment["total_size"], segment["stream"], segment.get("is_expandable", False),
                           segment=segment)
        for block in segment["blocks"]:
            if block["state"] in LIVE:
                live[at] = block["requested_size"], block["size"], segment["stream"], block.get("frames", ())
            at += block["size"]
    for i in range(len(snapshot.entries) - 1, -1, -1):  # backwards, each event undone
        entry = snapshot.entries[i]
        action, at, size, stream = entry["action"], entry.get("addr"), entry["size"], entry["stream"]
        if action == "alloc":
            if live.pop(at, None) is None:
                raise DamagedTrace(f"event {i} takes {size} bytes at {at:#x}, and nobody has them afterwards: the "
                                   "snapshot's segments are not of its end, or events are missing")
        elif action == "free_completed":
            if at in live:
                raise DamagedTrace(f"event {i} frees {size} bytes at {at:#x}, which are live afterwards: an alloc of "
                                   "them is missing")
            live[at] = size, None, stream, entry.get("frames", ())
        elif action in ("segment_free", "segment_unmap"):
            _put(ranges, Range(at, at + size, stream, action == "segment_unmap"), i)
        elif action in ("segment_alloc", "segment_map"):
            _cut(ranges, at, at + size, i)
    start = RecordingStart([ranges[at] for at in sorted(ranges)], live)
    _classify(start, snapshot, settings)
    _find_ends(start, snapshot, settings)
    _find_bases(start, snapshot, settings)
    return start


def _put(ranges, new, event):
    if new.expandable:  # joins what it touches
        for other in list(ranges.values()):
            touches = new.address == other.end or new.end == other.address
            if touches and other.expandable and other.stream == new.stream:
                del ranges[other.address]
                new = Range(min(new.address, other.address), max(new.end, other.end), new.stream, True,
                            segment=new.segment or other.segment)
    if any(each.address < new.end and new.address < each.end for each in ranges.values()):
        raise DamagedTrace(f"event {event} gives {new.address:#x} back, which has memory afterwards")
    ranges[new.address] = new


def _cut(ranges, first, last, event):
    found = next((each for each in ranges.values() if each.address <= first and last <= each.end), None)
    if found is None:
        raise DamagedTrace(f"event {event} brings {last - first} bytes of memory at {first:#x}, which are not there "
                           "afterwards")
    del ranges[found.address]
    for a, b in ((found.address, first), (last, found.end)):
        if a < b:
            ranges[a] = Range(a, b, found.stream, found.expandable, segment=found.segment)


def _classify(start, snapshot, settings):
    """Find the pool of each range: from its segment at the end; if it is gone by then, from the first request that it
    served, or had served, before it went. Another segment may have its addresses afterwards."""
    unknown = []
    for each in start.ranges:
        if each.segment is not None:
            each.small = each.segment["segment_type"] == "small"
            each.owner = tuple(each.segment.get("segment_pool_id", (0, 0)))
        else:
            each.small = each.end - each.address == SMALL_SEGMENT  # unless a request tells
            unknown.append(each)
    for at, (nbytes, *_) in start.live.items():
        for each in _holding(unknown, at):
            each.small = settings.rounded(nbytes) <= SMALL
    for entry in snapshot.entries if unknown else ():
        for each in _holding(unknown, entry.get("addr")):
            if entry["action"] in ("alloc", "free_completed"):
                each.small = settings.rounded(entry["size"]) <= SMALL
            if entry["action"] in ("alloc", "free_completed", "segment_free", "segment_unmap"):
                each.owner = tuple(entry.get("pool_id", (0, 0)))
                unknown.remove(each)


def _holding(ranges, address):
    return [each for each in ranges if address is not None and each.address <= address < each.end]


def _find_ends(start, snapshot, settings):
    """Find sizes that are not known: a block ends where another begins behind it, if nothing could be between.
    DamagedTrace for a block without memory."""
    open_ends = sorted(at for at, (_, size, _, _) in start.live.items() if size is None)
    known, ranges = sorted(start.live), [each.address for each in start.ranges]
    for at in known:
        i = bisect_right(ranges, at) - 1
        if i < 0 or at >= start.ranges[i].end:
            raise DamagedTrace(f"the block at {at:#x} is live when the recording begins, and no segment is there")
    for entry in snapshot.entries:
        at, i = entry.get("addr"), 0
        if entry["action"] == "alloc" and (i := bisect_left(open_ends, at)):
            first = open_ends[i - 1]
            nbytes, _, stream, frames = start.live[first]
            end = min([start.ranges[bisect_right(ranges, first) - 1].end, *known[bisect_right(known, first):][:1]])
            size = settings.rounded(nbytes)
            if at < end and not settings.splits(size, at - first - size):
                start.live[first] = nbytes, at - first, stream, frames
                open_ends.pop(i - 1)
        elif entry["action"] == "free_completed" and (i := bisect_left(open_ends, at)) < len(open_ends):
            if open_ends[i] == at:
                open_ends.pop(i)


def _find_bases(start, snapshot, settings):
    """Find where expandable segments begin: at the lowest address that is given memory while they have some."""
    mapped, ends = Counter(), {}
    for each in (each for each in start.ranges if each.expandable):
        key = each.stream, each.small, each.owner
        start.bases.setdefault(key, each.address)
        mapped[key], ends[key] = mapped[key] + each.end - each.address, each.end
    for entry in snapshot.entries:
        action, at, size, stream = entry["action"], entry.get("addr"), entry["size"], entry["stream"]
        owner = tuple(entry.get("pool_id", (0, 0)))
        # small pools grow by 2 MiB, large ones by 20 MiB
        if action == "segment_map" and mapped[key := (stream, size % settings.large_segment_size != 0, owner)]:
            start.bases[key], ends[key] = min(start.bases[key], at), max(ends[key], at + size)
            mapped[key] += size
        elif action == "segment_unmap":
            for key in ((stream, small, owner) for small in (True, False) if mapped[stream, small, owner]):
                mapped[key] -= size * (start.bases[key] <= at < ends[key])


def restore(allocator, start):
    """Put an empty CachingAllocator into this state; returns its live blocks, {address: Block}."""
    live, addresses, last = {}, sorted(start.live), {}
    for each in start.ranges:
        pool = allocator._pool(each.small, each.owner)
        inside = addresses[bisect_left(addresses, each.address):bisect_left(addresses, each.end)]
        segment, before = None, None
        if each.expandable:
            segment, before = _segment_of(allocator, last, each, pool, start.bases)
        else:
            allocator._segments[each.address] = each.end - each.address
        allocator.reserved += each.end - each.address
        for at, size, nbytes in _blocks(each, inside, start.live, allocator.settings):
            block = Block(at, size, each.stream, pool, segment)  # born 0: how old it is nobody recorded
            block.before, before = before, block
            if block.before is not None:
                block.before.after = block
            if nbytes is None:
                pool.add(block)
                continue
            block.free, block.requested, live[at] = False, nbytes, block
            allocator.allocated, allocator.requested = allocator.allocated + size, allocator.requested + nbytes
        if each.expandable:
            last[each.stream, each.small, each.owner] = before
    for block in last.values():
        _unmapped(block, block.segment.base + block.segment.size)
    allocator.live.update(live)
    return live


def _blocks(each, inside, live, settings):
    """Go through a range: (address, size, bytes asked for; None if it is free)."""
    at = each.address
    for i, first in enumerate(inside):
        nbytes, size, _, _ = live[first]
        if at < first:
            yield at, first - at, None
        end = inside[i + 1] if i + 1 < len(inside) else each.end
        if size is None:
            size = settings.rounded(nbytes)
            if first + size < end and not settings.splits(size, end - first - size):
                size = end - first
        if first + size > end:
            raise DamagedTrace(f"{size} bytes at {first:#x} reach beyond {end:#x}, where another block or no memory "
                               "is: is the recording of other settings?")
        yield first, size, nbytes
        at = first + size
    if at < each.end:
        yield at, each.end - at, None


def _segment_of(allocator, last, each, pool, bases):
    """Return the expandable segment of a range, and what is before it: addresses without memory, a block, or None."""
    before = last.get((each.stream, each.small, each.owner))
    if before is not None:
        return before.segment, _unmapped(before, each.address)
    base = bases[each.stream, each.small, each.owner]
    segment = expandable.new_segment(allocator, pool, base)
    if base == each.address:
        return segment, None
    before = Block(base, each.address - base, each.stream, pool, segment, mapped=False)
    pool.add(before)
    return segment, before


def _unmapped(before, end):
    """Add a block without memory behind `before`, up to `end`; returns it, or `before` if nothing is between."""
    if before.end == end:
        return before
    block = Block(before.end, end - before.end, before.stream, before.pool, before.segment, mapped=False)
    block.before, before.after = before, block
    before.pool.add(block)
    return block


def trace_of(snapshot: "Snapshot", settings: Any = None) -> "AllocationTrace":
    """Read a Snapshot as an AllocationTrace: what was live when the recording began comes first, by address.

    A block is free when no stream uses it any more. A request that failed is taken and freed at once. Its name is the
    first line of Python that is not PyTorch's own, its category the text of `_set_memory_metadata`, if there is one.
    """
    settings = Settings.of(snapshot) if settings is None else settings
    start, found, live = rewind(snapshot, settings), Maker(), {}
    first = 1000 * snapshot.entries[0].get("time_us", 0) if snapshot.entries else 0
    for at, (nbytes, _, stream, frames) in sorted(start.live.items()):
        live[at] = found.alloc(nbytes, "", line(frames), first, stream)
    for entry in snapshot.entries:
        action, at, time = entry["action"], entry.get("addr"), 1000 * entry.get("time_us", 0)
        if action in ("alloc", "oom"):
            number = found.alloc(entry["size"], entry.get("user_metadata") or "", line(entry.get("frames", ())), time,
                                 entry["stream"])
            if action == "alloc":
                live[at] = number
            else:
                found.free(number, time)
        elif action == "free_completed":
            found.free(live.pop(at), time)
    return found.trace()


def capacity_of(snapshot: "Snapshot", settings: Any = None) -> int | None:
    """Return the bytes that the allocator could reserve when a request first failed: what it had, and what the device
    had left; None if none failed."""
    settings = Settings.of(snapshot) if settings is None else settings
    reserved = sum(each.end - each.address for each in rewind(snapshot, settings).ranges)
    for entry in snapshot.entries:
        if entry["action"] == "oom":
            return reserved + entry["device_free"]
        reserved += entry["size"] * SEGMENT_EVENTS.get(entry["action"], 0)
    return None


def line(frames):
    """Return "file:line function" of the innermost frame of a user's."""
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    users = [frame for frame in python if "/torch/" not in frame["filename"].replace("\\", "/")]
    for frame in (users or python or list(frames))[:1]:
        where = f"{frame['filename'].replace(chr(92), '/').rpartition('/')[2]}:{frame['line']}"
        return f"{where} {frame['name']}" if frame["line"] else frame["name"]
    return ""
