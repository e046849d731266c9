"""Traces from elsewhere: each field with each kind of bad value is one ValueError, or is read."""

import json
import os

import pytest
from bad_files import BAD, HOLE, RAW, as_text, refused, ten_of, with_hole

from refimpl import memory
from refimpl.memory import trace_file

HEAD = ("format", "version", "fields", "ops", "records", "events", "lines", "notes", "device", "first_call", "began_ns")
NAMES = ("markup", "control")
ROWS = {  # place in a row: what may be there instead, and is read
    "head": dict.fromkeys(HEAD, ()), "line": {0: NAMES, 1: (), 2: NAMES}, "op": {0: NAMES, 1: NAMES, 2: NAMES, 3: ()},
    "record": {"device": NAMES, "op": NAMES, "phase": NAMES, "module": NAMES, "mark": ("markup",), "dtype": NAMES,
               "born": ("negative",), **dict.fromkeys(("nbytes", "roles", "shape", "line", "source", "owners",
                                                       *trace_file._FLAGS), ())},
    "event": {0: ("negative",), 1: (), 2: ("negative",)}}
CASES = [(row, field) for row, fields in ROWS.items() for field in fields]


def rows_of(path):
    return [json.loads(row) for row in path.read_text().splitlines()]


def damage(rows, row, field, bad):
    """Put the bad value in the head, or the first of the rows of a kind."""
    head = rows[0]
    at = {"head": 0, "line": 0, "op": 1, "record": 1 + head["ops"], "event": 1 + head["ops"] + head["records"]}[row]
    place = ("lines", 0, field) if row == "line" else (field,)
    if row == "record":
        place = (head["fields"].index(field),)
    with_hole(rows[at], place, bad)
    text = json.dumps(rows[at])
    return at, text if bad == "missing" else text.replace(f'"{HOLE}"', as_text(bad, another="[[1.5]]"))


@pytest.mark.alone
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("row", "field"), CASES)
def test_a_bad_field_is_refused_in_one_line(trace, tmp_path, row, field, bad):
    path = trace.save(tmp_path / "step.jsonl")
    texts = path.read_text().splitlines()
    at, texts[at] = damage(rows_of(path), row, field, bad)
    path.write_text("\n".join(texts) + "\n")

    def load():
        try:
            found = memory.load(path)
            assert not RAW.search(repr(found)) and "\nforged" not in repr(found)
        except ValueError as error:
            assert type(error) is ValueError
            return str(error)

    words = refused(load, tmp_path)
    path.unlink()
    accepted = ROWS[row][field] + (NAMES if row == "head" and field == "device" else ())
    assert (words is None) == (bad in accepted), words
    assert words is None or str(path) in words


def test_ten_of_these(trace, tmp_path):
    for (row, field), bad in ten_of(CASES, BAD):
        test_a_bad_field_is_refused_in_one_line(trace, tmp_path, row, field, bad)


def test_a_pipe_and_a_file_that_is_too_large(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a pipe or a device: expected a file"):
        memory.load(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(trace_file.LIMIT + 1)
    with pytest.raises(ValueError, match="has 1,073,741,825 bytes: expected at most"):
        memory.load(tmp_path / "large")


def test_a_category_that_no_ledger_takes(trace, tmp_path):
    path = trace.save(tmp_path / "step.jsonl")
    rows = rows_of(path)
    rows[1 + rows[0]["ops"]][rows[0]["fields"].index("mark")] = "grads"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="category 'grads': is it 'gradients'"):
        memory.load(path)
