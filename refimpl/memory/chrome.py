"""The timeline for chrome://tracing and ui.perfetto.dev (Trace Event Format): "C" counters, "X" spans of the phases,
and the largest storages, each from "b" to "e"."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.figure import phases
from .top import module_of, tensor_of

if TYPE_CHECKING:
    from os import PathLike

    from .trace import Trace

LARGEST = 300  # storages


def export_chrome(trace: "Trace", path: "str | PathLike[str]", name: str = "memory", pid: int = 0) -> Path:
    """Write `trace` to `path` as JSON: one counter of bytes by category, the phases as spans, and the LARGEST storages
    with their bytes, module and lines. Returns the Path.

    `pid` tells several ranks apart when their files are loaded together. OSError if `path` cannot be written.
    """
    timeline = trace.timeline
    begin = timeline.ops[0].time_ns
    microseconds = [(op.time_ns - begin) / 1000 for op in timeline.ops]
    events = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"{name} on {trace.device}"}}]
    for time, row in zip(microseconds, timeline.nbytes.tolist(), strict=True):
        events.append({"name": name, "ph": "C", "ts": time, "pid": pid,
                       "args": dict(zip(timeline.categories, row, strict=True))})
    for phase, first, last in phases(timeline):
        after = microseconds[min(last + 1, len(microseconds) - 1)]
        events.append({"name": phase, "ph": "X", "ts": microseconds[first], "dur": after - microseconds[first],
                       "pid": pid, "tid": 0})
    events += storages(trace, microseconds, pid)
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events}))  # no displayTimeUnit: Perfetto 20 scales all times by it
    return path


def storages(trace, microseconds, pid):
    """Return a pair of events for each of the largest storages: when it was made and when it was freed."""
    lives, categories, device = {}, trace.categories(), trace.device  # record -> (first, last change, bytes, the most)
    for index, i, delta in trace.events:
        if trace.records[i].device == device:
            first, _, held, most = lives.get(i, (index, index, 0, 0))
            lives[i] = first, index, held + delta, max(most, held + delta)
    found = []
    for i in sorted(lives, key=lambda i: -lives[i][3])[:LARGEST]:
        record, (first, last, held, most) = trace.records[i], lives[i]
        end = min(last + 1, len(microseconds) - 1) if not held else -1  # still alive: drawn to the end
        kind = f" {record.dtype} {record.shape}" if record.dtype else ""
        said = {"bytes": most, "module": module_of(record), "line": str(record.line or ""),
                "source": str(record.source or "")}
        both = {"name": tensor_of(record) + kind, "cat": categories[i], "id": i, "pid": pid, "tid": 1}
        found += [both | {"ph": "b", "ts": microseconds[first + 1], "args": said},
                  both | {"ph": "e", "ts": microseconds[end]}]
    return found
