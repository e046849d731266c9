"""A trace in a file: JSON lines, so that it can be read by anything and runs nothing when it is.

The first line says what the file is and how many operations, records and events follow, one a line. Lines of source are
written once, in the first line, and named by their number there.
"""

import json
import os
from dataclasses import fields
from pathlib import Path

from ..common.ledger import category_name
from ..untrusted.files import opened
from ..untrusted.text import shown
from .storage_records import Line, Op, StorageRecord

FORMAT, VERSION = "refimpl memory trace", 1
LIMIT, HEAD, ROW = 2**30, 2**23, 2**20  # bytes of a file, of its first line, and of another
BYTES = 2**50  # more than any storage has
_FIELDS = [field.name for field in fields(StorageRecord)]
_FLAGS = ("alive", "held_by_optimizer", "saved", "offered", "packed", "kept", "freed_by_backward")
_TEXTS = ("device", "op", "phase", "module", "dtype")


def save(trace, path):
    """Write `trace` (a Tracker too) to `path`, whole or not at all. Returns the Path. OSError if it cannot be."""
    path, lines = Path(path), {None: 0}
    records = [_written(record, lines) for record in trace.records]
    head = {"format": FORMAT, "version": VERSION, "device": trace._device, "first_call": trace.first_call,
            "began_ns": trace.began_ns, "notes": trace.notes, "fields": _FIELDS, "ops": len(trace.ops),
            "records": len(records), "events": len(trace.events), "lines": [line for line in lines if line]}
    being_written = path.with_name(f"{path.name}.{os.getpid()}.part")  # renamed at the end: no reader sees half a file
    try:
        with being_written.open("w", encoding="utf-8") as file:
            for row in (head, *trace.ops, *records, *trace.events):
                file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
        being_written.replace(path)
    finally:
        being_written.unlink(missing_ok=True)
    return path


def read(path):
    """Read what `save` wrote: the arguments of a Trace like the one that was saved. ValueError as in `load`."""
    rows = _Rows()
    try:
        with opened(path, LIMIT) as file:
            head = _head(rows.next(file, HEAD))
            ops, records, events = head["ops"], head["records"], head["events"]
            lines = [None, *map(_line, head["lines"])]
            made = ([_op(rows.next(file)) for _ in range(ops)],
                    [_record(rows.next(file), lines, ops) for _ in range(records)],
                    [_event(rows.next(file), ops, records) for _ in range(events)])
            if file.read(1):
                raise ValueError("the file goes on, behind what its first line announces: it was cut or added to")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}, line {rows.number}: this is no trace that save wrote: {error}") from error
    return *made, head["first_call"], head["device"], head["began_ns"], head["notes"]


class _Rows:
    """Reads line by line. `number`: of the line that was read last."""

    def __init__(self):
        self.number = 0

    def next(self, file, limit=ROW):
        """Return what the next line holds."""
        row = file.readline(limit + 1)
        self.number += 1
        if len(row) > limit:
            raise ValueError(f"it has more than {limit:,} bytes")
        if not row.endswith(b"\n"):
            raise ValueError("the file ends within it or before: it was cut or added to")
        return json.loads(row)


def _head(head):
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError(f"it does not begin with the format {FORMAT!r}")
    if head["version"] != VERSION:
        raise ValueError(f"version {shown(head['version'])} of the format; this refimpl reads {VERSION}: load it with "
                         "the refimpl that saved it")
    if head["fields"] != _FIELDS:
        raise ValueError(f"its records have the fields {shown(head['fields'])}, expected {_FIELDS}")
    for name in ("ops", "records", "events"):
        if not _is_whole(head[name], 0, 2**40):
            raise ValueError(f"{name}={shown(head[name])}: expected a number of lines")
    for name, good, words in (
            ("first_call", head["first_call"] is None or _is_whole(head["first_call"], 0, head["ops"] + 1),
             "null or the number of an operation"),
            ("began_ns", head["began_ns"] is None or _is_whole(head["began_ns"], 0, 2**63), "null or nanoseconds"),
            ("device", head["device"] is None or isinstance(head["device"], str), "null or a device's name"),
            ("notes", _are_texts(head["notes"]), "a list of texts"),
            ("lines", isinstance(head["lines"], list), "a list of lines of source")):
        if not good:
            raise ValueError(f"{name}={shown(head[name])}: expected {words}")
    return head


def _line(row):
    if not isinstance(row, list) or len(row) != 3 or not _are_texts(row[::2]) or not _is_whole(row[1], 0, 2**31):
        raise ValueError(f"{shown(row)}: expected the file, number and text of a line of source")
    return Line(*row)


def _is_whole(value, low, high):
    return type(value) is int and low <= value < high


def _are_texts(values):
    return isinstance(values, list) and all(isinstance(each, str) for each in values)


def _written(record, lines):
    """Return the fields of a record as JSON has them; its lines of source get numbers in `lines`."""
    row = {name: getattr(record, name) for name in _FIELDS}
    row |= {name: lines.setdefault(row[name], len(lines)) for name in ("line", "source")}
    row |= {"roles": sorted(record.roles), "owners": list(record.owners), "shape": list(record.shape)}
    return list(row.values())


def _op(row):
    name, phase, module, time_ns = row
    if not (_are_texts(row[:3]) and _is_whole(time_ns, 0, 2**63)):
        raise ValueError(f"{shown(row)}: expected the name, phase, module and time of an operation")
    return Op(name, phase, module, time_ns)


def _record(row, lines, ops):
    known = dict(zip(_FIELDS, row, strict=True))
    if not _is_whole(known["born"], -1, ops) or not _is_whole(known["nbytes"], 0, BYTES):
        raise ValueError(f"born={shown(known['born'])} of {ops} operations, nbytes={shown(known['nbytes'])}")
    if any(type(known[name]) is not bool for name in _FLAGS):
        raise ValueError(f"{shown({name: known[name] for name in _FLAGS})}: expected true or false")
    if not _are_texts([known[name] for name in _TEXTS]):
        raise ValueError(f"{shown({name: known[name] for name in _TEXTS})}: expected texts")
    if not _are_texts(known["roles"]) or not all(map(_is_owner, known["owners"])):
        raise ValueError(f"roles={shown(known['roles'])}, owners={shown(known['owners'])}: expected texts, and lists "
                         "of a module, its parameter and what of it")
    if not isinstance(known["shape"], list) or not all(_is_whole(size, 0, BYTES) for size in known["shape"]):
        raise ValueError(f"shape={shown(known['shape'])}: expected sizes")
    mark = known["mark"]
    if mark is not None and not (isinstance(mark, str) and mark.isprintable() and category_name(mark)):
        raise ValueError(f"mark={shown(mark)}: expected null or a category")
    known["roles"], known["shape"] = set(known["roles"]), tuple(known["shape"])
    known["owners"] = dict.fromkeys(map(tuple, known["owners"]))
    known |= {name: lines[_among(known[name], len(lines))] for name in ("line", "source")}
    return StorageRecord(**known)


def _is_owner(row):
    return isinstance(row, list) and len(row) == 3 and all(each is None or isinstance(each, str) for each in row)


def _event(row, ops, records):
    index, record, delta = row
    if not _is_whole(index, -1, ops + 1) or not _is_whole(delta, -BYTES, BYTES):
        raise ValueError(f"an event at operation {shown(index)} of {ops}, {shown(delta)} bytes")
    return index, _among(record, records), delta


def _among(number, count):
    if not _is_whole(number, 0, count):
        raise ValueError(f"number {shown(number)} of {count}")
    return number
