"""What `refimpl oom` says of runs that were killed, cut, or came one after another; what is no run's, in one line."""

import json
import subprocess
import sys

import pytest
import torch

from refimpl import cli, memory
from refimpl.guard import step_log
from refimpl.guard.step_log import StepLog, lines

TRAIN = """
import os, signal, sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
for step in range(1, 9):
    loss = model(torch.randn(2, 4)).sum()
    os.kill(os.getpid(), signal.SIGKILL if step == int(sys.argv[1]) else 0)
    loss.backward()
    optimizer.step()
"""


@pytest.fixture
def folder(tmp_path):
    """Of a guard that has seen a failure in step 3."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(RuntimeError), memory.guard(tmp_path / "oom"):
        for n in (2, 2, 2**50):
            model(torch.zeros(1).expand(n, 4)).sum().backward()
            optimizer.step()
    return tmp_path / "oom"


def said(folder, capsys):
    cli.main(["oom", str(folder)])
    return capsys.readouterr().out


def refused(folder, capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["oom", str(folder)])
    found = capsys.readouterr().err
    assert done.value.code == 2 and found.count("\n") == 1
    return found.partition("error: ")[2]


def test_a_run_that_was_killed_has_its_last_whole_step(tmp_path, capsys):
    (tmp_path / "train.py").write_text(TRAIN)
    assert subprocess.run([sys.executable, "-m", "refimpl", "run", "train.py", "4"], cwd=tmp_path).returncode == -9
    assert lines(tmp_path / "oom" / "rank0.steps.jsonl")[-1]["step"] == 3
    found = said(tmp_path / "oom", capsys)
    assert "was killed after step 3: no error went through Python" in found and "no request failed" in found


def test_a_line_that_was_cut_is_left_out(folder, capsys):
    whole = (path := folder / "rank0.steps.jsonl").read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:2]) + whole[2][:40])
    found = said(folder, capsys)
    assert json.loads(whole[2])["step"] == 2 and "was killed after step 1" not in found, "this process lives"
    assert "runs yet" in found and found.splitlines()[1].split()[:2] == ["rank0", "1"]


def test_a_second_run_loses_nothing_of_the_first(folder, capsys):
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "rank2.steps.jsonl").write_text('{"process": 0}\n')
    with memory.guard(folder):
        pass
    assert {path.name: path.read_bytes() for path in (folder / "earlier" / "1").glob("rank0*")} == first
    assert {"rank0.failure1.json", "rank0.failure1.txt", "rank0.steps.jsonl"} == first.keys()
    assert len([*(folder / "earlier" / "1").iterdir()]) == 4, "a rank that this run has not is set aside, too"
    assert "no request failed" in said(folder, capsys) and "failed first: rank0" in said(folder / "earlier/1", capsys)
    with memory.guard(folder):
        assert len([*(folder / "earlier" / "2").iterdir()]) == 1 and len([*folder.iterdir()]) == 2


def test_of_a_long_run_who_writes_and_what_failed_stay(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(step_log, "LIMIT", 2000)
    log = StepLog(tmp_path, 0)
    log.write({"failed": 1, "step": 2, "at": 0.0, "not reported": "no space"})
    for step in range(200):
        log.write({"step": step, "peak": 3, "now": 2, "known": {}, "batch": None})
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 4200
    found = said(tmp_path, capsys)
    assert "runs yet" in found and "in step 2; there is no report of it: no space" in found
    assert found.count("rank0") == 2, "the failure is there once"
    monkeypatch.setattr(step_log.os, "getpid", lambda: 1)
    (other := StepLog(tmp_path, 0)).close("by itself")
    assert other.name == "rank0.1", "the first is in use"
    log.folder = tmp_path / "gone"
    for step in range(100):
        log.write({"step": step})
    assert "No such file" in log.why_not
    log.close("by itself")


def test_names_that_would_move_the_cursor_are_written_out(folder, capsys):
    report = json.loads((path := folder / "rank0.failure1.json").read_text())
    report["line"] = report["causes"][0]["what"] = report["live"]["modules"][0][0] = "a\x1b[2Jb\u202ec"
    path.write_text(json.dumps(report))
    with open(folder / "rank0.steps.jsonl", "a") as log:
        log.write(json.dumps({"said": "grows\x1b]0;x\x07\nforged"}) + "\n")
    found = said(folder, capsys)
    assert "\x1b" not in found and "\u202e" not in found and "\x07" not in found
    assert found.count("a\\x1b[2Jb\\u202ec") == 3 and "rank0: grows\\x1b]0;x\\x07\\nforged\n" in found


def test_what_is_no_guard_s_is_refused_in_a_line(folder, tmp_path, capsys):
    assert "is no folder" in refused(tmp_path / "none", capsys)
    assert "has no rank*.steps.jsonl" in refused(tmp_path, capsys)
    log, report = folder / "rank0.steps.jsonl", folder / "rank0.failure1.json"
    for text in ("no JSON", "[]", '{"device": 3}', "\x1b"):
        report.write_text(text)
        assert "rank0.failure1.json is no report of a guard's" in refused(folder, capsys)
    report.unlink()
    assert "No such file" in refused(folder, capsys)
    for text in ('{"step": 1, "peak": null}', '{"step": "x", "peak": 1}', '{"failed": [], "at": 1}', '{"failed": 1}'):
        log.write_text(text)
        assert "has lines that no guard has written" in refused(folder, capsys)


def test_a_rank_whose_batch_nobody_saw_has_no_numbers_in_it(tmp_path, capsys):
    for rank, batch in enumerate((None, {"shape": [2, 3]})):
        log = StepLog(tmp_path, rank, 2)
        log.write({"step": 1, "peak": 3, "now": 2, "known": {}, "batch": batch})
        log.close("by itself")
    assert "in step 1, numbers in the batch: rank0 0, rank1 6\n" in said(tmp_path, capsys)
