"""A trace as one page that needs nothing else: the timeline, and whose each byte is, under a pointer or by keys.

The page is bounded. Of a long trace it has COLUMNS moments, each the highest of its neighbourhood; of many storages the
TENSORS largest, those of the peak first; the others are summed by category. What it shows is exact: each moment and
each tensor is one of the trace's.
"""

import json
from html import escape
from pathlib import Path

import numpy as np

from ..common.figure import colour
from ..common.ledger import human
from .top import BY, bytes_after, module_of, phase_of, tensor_of

COLUMNS, TENSORS, ROWS, LETTERS = 1500, 1500, 40, 160
TEMPLATE = Path(__file__).parent / "web" / "page.html"


def to_html(trace, path, title="Memory over a training step"):
    """Write `trace` to `path` as one self-contained HTML page of at most about a megabyte. Returns the Path.

    OSError if `path` cannot be written.
    """
    data = json.dumps(page_data(trace), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    before, after = (part.replace("TITLE", escape(title))
                     for part in TEMPLATE.read_text(encoding="utf-8").split("DATA", 1))
    path = Path(path)
    path.write_text(before + data + after, encoding="utf-8")
    return path


def page_data(trace):
    """Return what the page shows, as JSON has it."""
    timeline, strings = trace.timeline, Strings()
    peak = timeline.peak()
    rows = moments(timeline.totals)
    used = np.flatnonzero(timeline.nbytes.any(axis=0)).tolist()
    names = [timeline.categories[k] for k in used]
    tensors = drawn(trace, rows, names, strings, peak.index)
    columns = [(row, *map(strings, (op.name, op.phase, op.module))) for row, op in
               ((row, timeline.ops[row]) for row in rows.tolist())]
    where = f"after {peak.operation} in {peak.module or 'no module'}, {peak.phase}"
    summary = f"Peak on {trace.device}: {peak.ledger.total:,} bytes ({human(peak.ledger.total)}), {where}."
    shares = ", ".join(f"{name} {human(nbytes)}" for name, nbytes in peak.ledger.items())
    return {
        "summary": summary, "notes": trace.notes, "peak": int(np.searchsorted(rows, peak.index)),
        "alt": f"Bytes by category after each of {len(trace.ops):,} operations. {summary} {shares}.",
        "kept": f"Drawn: {len(rows):,} of {len(timeline):,} moments and {len(tensors):,} of {len(trace.records):,} "
                "storages, the rest summed by category.",
        "categories": [{"name": name, "colour": colour(name)} for name in names],
        "columns": columns, "nbytes": timeline.nbytes[rows][:, used].T.tolist(), "tensors": tensors,
        "tables": [(f"By {by}", [(cut(name), n) for name, n in trace.top(ROWS, by=by)], by in ("category", "module"))
                   for by in ("category", *BY[:-1])],
        "strings": list(strings),
    }


def moments(totals):
    """Return the rows to draw: all, or of each neighbourhood the highest, so that the peak is always among them."""
    if len(totals) <= COLUMNS:
        return np.arange(len(totals))
    ends = np.linspace(0, len(totals), COLUMNS + 1).astype(int)
    return np.array([begin + int(totals[begin:end].argmax()) for begin, end in zip(ends, ends[1:], strict=False)])


def drawn(trace, rows, categories, strings, peak):
    """Return the largest storages: [name, category, module, line, source, phase, [column, bytes, …]]."""
    found, at_peak, device = trace.categories(), bytes_after(trace, peak), trace.device
    changes = {}
    for index, i, delta in trace.events:
        if trace.records[i].device == device:
            changes.setdefault(i, []).append((index + 1, delta))
    largest = {i: max(np.cumsum([delta for _, delta in each]).tolist()) for i, each in changes.items()}
    wanted = sorted(largest, key=lambda i: (-int(at_peak[i]), -largest[i]))[:TENSORS // 2]
    wanted = {*wanted, *sorted(largest, key=lambda i: -largest[i])[:TENSORS // 2]}
    tensors = []
    for i in sorted(wanted):
        record, sizes = trace.records[i], sizes_at(changes[i], rows)
        if sizes:
            name = " ".join(filter(None, (tensor_of(record), record.dtype, str(record.shape) if record.dtype else "")))
            said = (module_of(record), written(record.line), written(record.source), phase_of(trace, record))
            tensors.append([strings(name), categories.index(found[i]), *map(strings, said), sizes])
    return tensors


def sizes_at(changes, rows):
    """Return [column, bytes, …]: the size from each column on at which it differs from the one before."""
    columns = np.searchsorted(rows, [row for row, _ in changes]).tolist()
    sizes, held = {}, 0
    for column, (_, delta) in zip(columns, changes, strict=True):
        held += delta
        if column < len(rows):
            sizes[column] = held
    flat, before = [], 0
    for column, nbytes in sizes.items():
        if nbytes != before:
            flat += [column, nbytes]
            before = nbytes
    return flat


def written(line):
    """Return a line of source as one string, "" for None."""
    return "" if line is None else f"{line}: {line.text}"


def cut(text):
    """Return at most LETTERS letters of `text`."""
    return text if len(text) <= LETTERS else text[:LETTERS - 1] + "…"


class Strings(dict):
    """Numbers strings: `strings("mm")` is its place in `list(strings)`."""

    def __call__(self, text):
        """Return the number of `text`, a new one if it is new."""
        return self.setdefault(cut(text), len(self))
