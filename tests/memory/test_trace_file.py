"""A trace in a file and back: nothing is lost, and what is no such file is refused by name."""

import dataclasses
import json

import pytest
import torch

from refimpl import memory
from refimpl.memory.storage_records import StorageRecord


@pytest.fixture
def saved(trace, tmp_path):
    trace.notes.append("a note with é and \n a break")
    return trace, trace.save(tmp_path / "step.jsonl")


def test_nothing_is_lost(saved):
    t, path = saved
    back = memory.load(str(path))
    for name in ("ops", "records", "events", "first_call", "began_ns", "notes", "_device"):
        assert getattr(back, name) == getattr(t, name), name
    for field in dataclasses.fields(StorageRecord):  # with the same types, and the order of owners
        pairs = [(getattr(a, field.name), getattr(b, field.name)) for a, b in zip(back.records, t.records, strict=True)]
        assert all(type(a) is type(b) and (not isinstance(a, dict) or list(a) == list(b)) for a, b in pairs), field.name
    assert back.peak == t.peak and repr(back) == repr(t) and back.top(99, by="line") == t.top(99, by="line")
    assert memory.load(back.on("cpu").save(path.with_name("again"))).device == "cpu"
    assert {each.name for each in path.parent.iterdir()} == {"step.jsonl", "again"}  # nothing half-written


def changed(path, line, change):
    rows = path.read_text().split("\n")
    row = json.loads(rows[line])
    change(row)
    rows[line] = json.dumps(row)
    path.write_text("\n".join(rows))


@pytest.mark.parametrize(("damage", "complaint"), [
    (lambda path: path.write_bytes(b"\x80\x04\x95"), "is no trace that save wrote"),
    (lambda path: path.write_text("{}\n"), "line 1: .* does not begin with the format"),
    (lambda path: path.write_text("hello\n"), "line 1: "), (lambda path: path.write_text(""), "line 1: "),
    (lambda path: path.write_text(path.read_text()[:-40]), "it was cut or added to"),
    (lambda path: path.write_text(path.read_text() + "[]\n"), "it was cut or added to"),
    (lambda path: changed(path, 0, lambda head: head.update(version=2)), "version 2 of the format; this refimpl"),
    (lambda path: changed(path, 0, lambda head: head["fields"].pop()), "its records have the fields"),
    (lambda path: changed(path, 0, lambda head: head.update(ops="4")), "ops='4'"),
    (lambda path: changed(path, 3, lambda op: op.__setitem__(3, "now")), "line 4: .*time of an operation"),
    (lambda path: changed(path, -2, lambda event: event.__setitem__(1, 10**6)), "number 1000000 of"),
    (lambda path: changed(path, -2, lambda event: event.__setitem__(2, 0.5)), "0.5 bytes")])
def test_what_is_no_such_file_is_refused(saved, damage, complaint):
    _, path = saved
    damage(path)
    with pytest.raises(ValueError, match=complaint) as refused:
        memory.load(path)
    assert "step.jsonl" in str(refused.value)


def test_no_file_and_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        memory.load(tmp_path / "missing")
    with memory.track() as t:
        pass
    with pytest.raises(FileNotFoundError):
        t.save(tmp_path / "missing" / "t")
    assert memory.load(t.save(tmp_path / "empty")).peak == {}


def test_a_storage_of_no_bytes_is_one(tmp_path):
    with memory.track() as t:
        empty = torch.empty(0) * 2
    back = memory.load(t.save(tmp_path / "t"))
    assert empty.numel() == 0 and [each.nbytes for each in back.records] == [each.nbytes for each in t.records]
    assert 0 in {each.nbytes for each in back.records}
