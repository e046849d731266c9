"""The HTML page: what it shows is the trace's, it needs nothing else, and it does not grow with the trace."""

import html
import json
import re

import numpy as np
import pytest

from refimpl import memory
from refimpl.common.ledger import Ledger, Table
from refimpl.memory.page import COLUMNS, TENSORS, moments
from refimpl.memory.trace import Line, Op, StorageRecord, Trace


def shown(path):
    text = path.read_text(encoding="utf-8")
    return text, json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[1])


def test_every_byte_of_every_moment_is_the_traces(trace, tmp_path):
    text, data = shown(trace.to_html(tmp_path / "t.html", title="A <step>"))
    assert "<title>A &lt;step&gt;</title>" in text and f"{trace.peak.total:,} bytes" in data["summary"] in data["alt"]
    assert not re.search(r"https?:|src=|<link|@import|fetch\(", text)  # offline
    timeline, names = trace.timeline, [category["name"] for category in data["categories"]]
    assert len(data["columns"]) == len(timeline) and data["columns"][data["peak"]][0] == trace.peak_moment().index
    drawn = np.zeros((len(names), len(timeline)), dtype=np.int64)
    for _, category, *_, sizes in data["tensors"]:
        steps = [*zip(sizes[::2], sizes[1::2], strict=True), (len(timeline), 0)]
        for (begin, nbytes), (end, _) in zip(steps, steps[1:], strict=False):
            drawn[category, begin:end] += nbytes
    for k, name in enumerate(names):
        held = timeline.nbytes[:, timeline.categories.index(name)]
        assert data["nbytes"][k] == held.tolist() == drawn[k].tolist()  # there are few: all are drawn
    said = {data["strings"][tensor[0]]: tensor for tensor in data["tensors"]}
    _, _, module, line, source, phase, _ = said["gradient of blocks.1.mlp.up.weight float32 (128, 32)"]
    assert [data["strings"][i] for i in (module, phase)] == ["blocks.1.mlp.up", "backward"]
    assert "loss = model(tokens, tokens)" in data["strings"][line] and "refimpl/model.py" in data["strings"][source]
    tables = {title: rows for title, rows, _ in data["tables"]}
    assert tables["By line"] == [list(row) for row in trace.top(40, by="line")]


EVIL = "<img src=x onerror=alert(1)>&'"


def test_what_a_file_from_elsewhere_names_is_text_in_a_notebook_and_on_a_page(trace, tmp_path):
    path = trace.save(tmp_path / "trace.jsonl")
    text = path.read_text(encoding="utf-8")
    for name in ("cpu", "parameters", "blocks.1.mlp.up", "forward"):
        text = text.replace(name, json.dumps(EVIL, ensure_ascii=False)[1:-1])
    path.write_text(text, encoding="utf-8")
    theirs = memory.load(path)
    both = memory.beside(mine=trace, theirs=theirs)
    for shown_as in (theirs._repr_html_(), theirs.peak._repr_html_(), both._repr_html_(),
                     Ledger({EVIL: 5})._repr_html_(), Table({EVIL: Ledger({"x": 1})})._repr_html_(),
                     theirs.to_html(tmp_path / "t.html", title=EVIL).read_text(encoding="utf-8")):
        assert "<img" not in shown_as
    assert "&lt;img" in theirs._repr_html_()


@pytest.mark.parametrize("title", ["TRAIN_DATA.py", "DATA", "TITLE", "</title><script>", "DATA TITLE DATA"])
def test_a_title_may_be_any_text(trace, tmp_path, title):
    text, data = shown(trace.to_html(tmp_path / "t.html", title=title))
    assert f"<title>{html.escape(title)}</title>" in text and len(data["columns"]) == len(trace.timeline)


def test_a_long_trace_makes_no_long_page_and_keeps_its_peak(tmp_path):
    N, line = 40_000, Line("x" * 300, 1, "y" * 300)
    ops = [Op(f"op{i}", "forward", f"module.{i}", i) for i in range(N)]
    records = [StorageRecord("cpu", f"op{i}", "forward", f"module.{i}", i, 8, alive=False, line=line) for i in range(N)]
    sizes = np.random.default_rng(0).integers(1, 10**9, N).tolist()
    events = [event for i in range(N) for event in ((i, i, sizes[i]), (min(i + 3, N), i, -sizes[i]))]
    trace = Trace(ops, records, sorted(events, key=lambda event: event[0]))
    path = trace.to_html(tmp_path / "long.html")
    _, data = shown(path)
    assert path.stat().st_size < 2**20 and len(data["columns"]) == COLUMNS and len(data["tensors"]) <= TENSORS
    column, total = data["peak"], sum(row[data["peak"]] for row in data["nbytes"])
    assert data["columns"][column][0] == trace.peak_moment().index and total == trace.peak.total
    assert 0 < sum(dict(zip(s[6][::2], s[6][1::2], strict=True)).get(column, 0) for s in data["tensors"]) <= total


@pytest.mark.parametrize("N", [1, COLUMNS, COLUMNS + 1, 10 * COLUMNS])
def test_moments_are_in_order_and_hold_the_highest(N):
    totals = np.random.default_rng(N).integers(0, 9, N)
    rows = moments(totals)
    assert len(rows) == min(N, COLUMNS) and (np.diff(rows) > 0).all() and int(totals.argmax()) in rows


def test_text_of_a_program_cannot_end_the_page(tmp_path):
    records = [StorageRecord("cpu", "<b>", "forward", "<i>", 0, 8, line=Line("a.py", 1, "x = '</script><b>'"))]
    trace = Trace([Op("<b>", "forward", "<i>", 1)], records, [(0, 0, 8)], notes=["</script>"])
    text, data = shown(trace.to_html(tmp_path / "t.html"))
    assert text.count("</script>") == 2 and data["notes"] == ["</script>"]
