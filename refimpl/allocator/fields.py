"""What the fields of a snapshot have to be, and an error that names the one that is not."""

from typing import NamedTuple

from ..common.allocations import DamagedTrace
from ..untrusted.text import shown


class Kind(NamedTuple):
    """Says in words what is expected, and tells whether a value is that."""

    words: str
    has: object


def _whole(low, high):
    return lambda value: type(value) is int and low <= value < high  # isinstance would take True for 1


def _text(most):
    return lambda value: type(value) is str and len(value) <= most


LIST, DICT = Kind("list", lambda value: type(value) is list), Kind("dict", lambda value: type(value) is dict)
FLAG = Kind("bool", lambda value: type(value) is bool)
SIZE = Kind("int, of bytes: 0 or more, below 2^50", _whole(0, 2**50))
ROOM = Kind("int, of bytes: 1 or more, below 2^50", _whole(1, 2**50))
ADDRESS = Kind("int, an address: 0 or more, below 2^62", _whole(0, 2**62))
WORD = Kind("int of 64 bits", _whole(-2**63, 2**63))
TIME = Kind("int, microseconds since 1970, below 2^53", _whole(0, 2**53))
INDEX = Kind("int, of a device", _whole(0, 2**15))
NAME, SETTINGS = Kind("str, of up to 2^20 letters", _text(2**20)), Kind("str, of up to 10,000 letters", _text(10**4))
METADATA = Kind(NAME.words, lambda value: value is None or NAME.has(value))
POOL = Kind("pair of ints", lambda value: type(value) in (tuple, list) and len(value) == 2 and all(
    type(part) is int for part in value))
SHARE = Kind("number from 0 to below 1", lambda value: type(value) in (int, float) and 0 <= value < 1)
LARGE = Kind("int", lambda value: type(value) is int)
DIVISIONS = Kind("dict of ints, 0 or more", lambda value: type(value) is dict and all(
    type(key) is str and _whole(0, 2**31)(part) for key, part in value.items()))

EVENTS = ("alloc", "free_requested", "free_completed", "oom")
SEGMENT_EVENTS = {"segment_alloc": 1, "segment_free": -1, "segment_map": 1, "segment_unmap": -1}  # what is reserved
OTHERS = {"snapshot", "user_defined"}  # marks of the user's, without memory

WHOLE = {"segments": LIST, "device_traces": LIST}
RESOLVED = {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS, "max_split_size": LARGE, "garbage_collection_threshold": SHARE,
            "expandable_segments": FLAG, "roundup_power2_divisions": DIVISIONS}
SEGMENT = {"address": ADDRESS, "total_size": ROOM, "stream": WORD, "segment_type": NAME, "blocks": LIST}
SEGMENT_TOO = {"device": INDEX, "segment_pool_id": POOL, "is_expandable": FLAG}
BLOCK = {"size": ROOM, "requested_size": SIZE, "state": NAME}
EVENT_TOO = {"time_us": TIME, "pool_id": POOL, "user_metadata": METADATA}
FRAME = {"filename": NAME, "line": WORD, "name": NAME}


def check_whole(found, where):
    """Check what a file holds, but for its segments and events. DamagedTrace, as the others, names the field."""
    _check(found, where, WHOLE, {"allocator_settings": DICT})
    _check(found.get("allocator_settings", {}), f"{where}: allocator_settings", {}, RESOLVED)


def check_list(found, where):
    """Check that a device's events are a list."""
    if type(found) is not list:
        raise DamagedTrace(f"{where} is {shown(found)}: expected a list of events")


def check_segment(segment, where, seen):
    """Check a segment and its blocks. `seen`: ids of the frames that were checked, since snapshots share them."""
    _check(segment, where, SEGMENT, SEGMENT_TOO)
    for i, block in enumerate(segment["blocks"]):
        _check(block, f"{where}.blocks[{i}]", BLOCK)
        _check_frames(block, f"{where}.blocks[{i}]", seen)
    inside = sum(block["size"] for block in segment["blocks"])
    if inside != segment["total_size"]:
        raise DamagedTrace(f"{where}.blocks have {inside} bytes, its total_size is {segment['total_size']}")


def check_apart(segments, where):
    """Check that no two segments have the same memory."""
    ordered = sorted(segments, key=lambda each: each["address"])
    for before, after in zip(ordered, ordered[1:], strict=False):
        if after["address"] < before["address"] + before["total_size"]:
            raise DamagedTrace(f"{where}: two segments have the memory at {after['address']:#x}")


def check_entry(entry, where, seen):
    """Check an event."""
    _check(entry, where, {"action": NAME})
    action = entry["action"]
    if action in OTHERS:
        return
    if action not in (*EVENTS, *SEGMENT_EVENTS):
        raise DamagedTrace(f"{where}.action is {shown(action)}: expected {', '.join((*EVENTS, *SEGMENT_EVENTS))}")
    at = {"device_free": SIZE} if action == "oom" else {"addr": ADDRESS}
    _check(entry, where, {**at, "size": ROOM if action in SEGMENT_EVENTS else SIZE, "stream": WORD}, EVENT_TOO)
    _check_frames(entry, where, seen)


def _check_frames(found, where, seen):
    frames = found.get("frames", [])
    if type(frames) is not list:
        raise _refusal(where, "frames", frames, LIST)
    for i, frame in enumerate(frames):
        if id(frame) not in seen:
            _check(frame, f"{where}.frames[{i}]", FRAME)
            seen.add(id(frame))


def _check(found, where, required, optional=()):
    """Check a dict: {name: Kind} that it has to have, and of what else it may have."""
    if type(found) is not dict:
        raise DamagedTrace(f"{where} is a {type(found).__name__}: expected a dict with {', '.join(required)}")
    for name, kind in required.items():
        if name not in found or not kind.has(found[name]):
            raise _refusal(where, name, found.get(name, "missing"), kind)
    for name, kind in dict(optional).items():
        if name in found and not kind.has(found[name]):
            raise _refusal(where, name, found[name], kind)


def _refusal(where, name, value, kind):
    return DamagedTrace(f"{where}.{name} is {shown(value)}: expected {kind.words}, as in snapshots of torch 2.1 and "
                        "later")
