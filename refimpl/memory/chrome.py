"""The timeline as counters for chrome://tracing and ui.perfetto.dev (Trace Event Format: "C" counters, "X" spans)."""

import json
from pathlib import Path

from .figure import phases


def export_chrome(trace, path, name="memory", pid=0):
    """Write `trace` to `path` as JSON: one counter of bytes by category, and the phases as spans. Returns the Path.

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
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path
