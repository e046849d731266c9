"""A trace in a file: JSON lines, so that it can be read by anything and runs nothing when it is.

The first line says what the file is and how many operations, records and events follow, one a line. Lines of source are
written once, in the first line, and named by their number there.
"""

import json
import os
from dataclasses import fields
from pathlib import Path

from .records import Line, Op, StorageRecord
from .trace import Trace

FORMAT, VERSION = "refimpl memory trace", 1
_FIELDS = [field.name for field in fields(StorageRecord)]
_INTEGERS, _FLAGS = ("born", "nbytes"), ("alive", "held_by_optimizer", "saved", "offered", "packed", "kept",
                                         "freed_by_backward")


def save(trace, path):
    """Write `trace` (a Tracker too) to `path`, whole or not at all. Returns the Path. OSError if it cannot be."""
    path, lines = Path(path), {None: 0}
    records = [_written(record, lines) for record in trace.records]
    head = {"format": FORMAT, "version": VERSION, "device": trace._device, "first_call": trace.first_call,
            "began_ns": trace.began_ns, "notes": trace.notes, "fields": _FIELDS, "ops": len(trace.ops),
            "records": len(records), "events": len(trace.events), "lines": [line for line in lines if line]}
    being_written = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with being_written.open("w", encoding="utf-8") as file:
            for row in (head, *trace.ops, *records, *trace.events):
                file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
        being_written.replace(path)
    finally:
        being_written.unlink(missing_ok=True)
    return path


def load(path):
    """Read what `save` wrote: a Trace with all readings of the one that was saved.

    ValueError, with the file and its line, for a file of another kind or version, and for one that is damaged or cut.
    """
    path = Path(path)
    try:
        rows = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no trace that save wrote: {error}") from error
    number = 1
    try:
        head = _head(rows[0])
        counts = [head["ops"], head["records"], head["events"]]
        if len(rows) != sum(counts) + 2 or rows[-1]:
            number = len(rows)
            raise ValueError(f"the file has {len(rows) - 1} lines, its first line announces {sum(counts) + 1}: it was "
                             "cut or added to")
        lines, made = [None, *(Line(*line) for line in head["lines"])], []
        for number, row in enumerate(rows[1:-1], 2):
            place = number - 2
            row = json.loads(row)
            if place < counts[0]:
                made.append(_op(row))
            elif place < counts[0] + counts[1]:
                made.append(_record(row, lines, counts[0]))
            else:
                made.append(_event(row, counts))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}, line {number}: no trace that save wrote: {error}") from error
    ops, records, events = made[:counts[0]], made[counts[0]:counts[0] + counts[1]], made[counts[0] + counts[1]:]
    return Trace(ops, records, events, head["first_call"], head["device"], head["began_ns"], head["notes"])


def _head(row):
    head = json.loads(row)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise ValueError(f"it does not begin with the format {FORMAT!r}")
    if head["version"] != VERSION:
        raise ValueError(f"version {head['version']!r} of the format; this refimpl reads {VERSION}: load it with the "
                         "refimpl that saved it")
    if head["fields"] != _FIELDS:
        raise ValueError(f"its records have the fields {head['fields']}, expected {_FIELDS}")
    for name in ("ops", "records", "events"):
        if type(head[name]) is not int or head[name] < 0:
            raise ValueError(f"{name}={head[name]!r}: expected a number of lines")
    return head


def _written(record, lines):
    """The fields of a record as JSON has them; its lines of source get numbers in `lines`."""
    row = {name: getattr(record, name) for name in _FIELDS}
    row |= {name: lines.setdefault(row[name], len(lines)) for name in ("line", "source")}
    row |= {"roles": sorted(record.roles), "owners": list(record.owners), "shape": list(record.shape)}
    return list(row.values())


def _op(row):
    name, phase, module, time_ns = row
    if not (isinstance(name, str) and isinstance(phase, str) and isinstance(module, str) and type(time_ns) is int):
        raise ValueError(f"{row}: expected the name, phase, module and time of an operation")
    return Op(name, phase, module, time_ns)


def _record(row, lines, ops):
    known = dict(zip(_FIELDS, row, strict=True))
    if any(type(known[name]) is not int for name in _INTEGERS) or not -1 <= known["born"] < ops:
        raise ValueError(f"born={known['born']!r} of {ops} operations, nbytes={known['nbytes']!r}")
    if any(type(known[name]) is not bool for name in _FLAGS):
        raise ValueError(f"{ {name: known[name] for name in _FLAGS} }: expected true or false")
    known["roles"], known["shape"] = set(known["roles"]), tuple(known["shape"])
    known["owners"] = dict.fromkeys((module, tensor, what) for module, tensor, what in known["owners"])
    known |= {name: lines[_among(known[name], len(lines))] for name in ("line", "source")}
    return StorageRecord(**known)


def _event(row, counts):
    index, record, delta = row
    if type(index) is not int or type(delta) is not int or not -1 <= index <= counts[0]:
        raise ValueError(f"an event at operation {index!r} of {counts[0]}, {delta!r} bytes")
    return index, _among(record, counts[1]), delta


def _among(number, count):
    if type(number) is not int or not 0 <= number < count:
        raise ValueError(f"number {number!r} of {count}")
    return number
