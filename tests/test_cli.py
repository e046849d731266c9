"""`python -m refimpl`: it says what there is, and does what the modules' own commands do."""

import importlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from allocator_kit import random_trace

from benchmarks import NAMES, record
from refimpl import allocator, cli

ROOT = Path(__file__).parent.parent


def test_without_a_command_it_says_what_there_is():
    done = subprocess.run([sys.executable, "-m", "refimpl"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "usage: python -m refimpl" in done.stdout and "bench" in done.stdout and "make lab" in done.stdout


def test_each_command_is_listed_and_described(capsys):
    cli.main([])
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("    ")}
    assert {"bench", "replay", "estimate", "explain", "rehearse", "run", "oom", "check"} <= listed
    told = (ROOT / "docs" / "your_own_code.md").read_text() + (ROOT / "docs" / "where_to_run.md").read_text()
    assert [name for name in ("replay", "estimate", "explain", "rehearse", "run", "oom", "check")
            if f"refimpl {name} " not in told] == []


def test_the_installed_command_is_the_same(monkeypatch, capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["refimpl"]) is cli.main
    monkeypatch.setattr(sys, "argv", ["/usr/bin/refimpl"])
    cli.main([])
    assert capsys.readouterr().out.startswith("usage: refimpl [-h]")


def test_bench_runs_a_bench(monkeypatch, capsys):
    rows = [record.row("ours", "theirs", "s", 1.0, 2.0)]
    monkeypatch.setattr(importlib.import_module("benchmarks.comm"), "run", lambda device: ({}, rows))
    cli.main(["bench", "comm"])
    assert capsys.readouterr().out.splitlines()[-1].split() == "ours 1 s theirs 2 s 0.5000".split()


def test_its_help_describes_every_bench(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--help"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert done.value.code == 0 and [[name, line] for name, line in NAMES.items()] == lines[-len(NAMES) - 1 : -1]


def test_an_installed_package_says_where_the_benchmarks_are(tmp_path):
    with pytest.raises(SystemExit) as done:
        cli.benchmarks(tmp_path)
    assert "benchmarks/ of the repository" in done.value.code and "\n" not in done.value.code


@pytest.mark.parametrize(("arguments", "message"), [
    (["benhc"], "invalid choice: 'benhc'"), (["bench"], "NAME"), (["bench", "comm", "--out", "x"], "give both")])
def test_what_makes_no_sense_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as done:
        cli.main(arguments)
    assert done.value.code == 2 and message in capsys.readouterr().err


def test_replay_says_what_failed_and_why(tmp_path, capsys):
    trace = random_trace(3000)
    path = allocator.record(trace, capacity=500 * 2**20).save(tmp_path / "s.pickle")
    cli.main(["replay", str(path)])
    said = capsys.readouterr().out
    found = allocator.replay(trace, capacity=500 * 2**20)
    assert "addresses and" in said and "as recorded\n" in said, "no difference from the recording"
    table = [line.split() for line in said.splitlines() if " ×  " in line]  # bytes, share, count, ×, op, number
    assert said.startswith("live when a request failed, with it: ") and len(table) == 7
    live = sum(int(row[0].replace(",", "")) for row in table)
    assert live == trace.live_bytes[found.failure.event], "all that is live, with the request that failed"
    assert f"event {found.failure.event} asks for {found.failure.nbytes:,} bytes and gets none" in said
    assert "expandable_segments:True: " in said and f"less than {trace.peak:,} bytes" not in said
    cli.main(["replay", str(path), "--capacity", "40GiB", "--settings", "expandable_segments:True"])
    said = capsys.readouterr().out
    assert "replayed with 42,949,672,960 bytes, settings expandable_segments:True" in said and "gets none" not in said


@pytest.mark.parametrize(("arguments", "message"), [
    (["other.pickle"], "No such file"), ([__file__], "is not a whole file of torch.cuda.memory._dump_snapshot"),
    (["--capacity", "many", "x"], "invalid size value: 'many': expected 24GiB"),
    (["--capacity", "24GB", "x"], "invalid size value: '24GB'"), (["--capacity", "0", "x"], "invalid size value: '0'")])
def test_a_replay_of_no_snapshot_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as done:
        cli.main(["replay", *arguments])
    assert done.value.code == 2 and message in capsys.readouterr().err


def test_a_snapshot_without_a_recording_says_how_to_record(tmp_path, capsys):
    path = allocator.Snapshot([], []).save(tmp_path / "s.pickle")
    with pytest.raises(SystemExit) as done:
        cli.main(["replay", str(path)])
    said = capsys.readouterr().err
    assert done.value.code == 2 and "has neither events nor segments of device 0" in said
    assert "_record_memory_history()" in said
    whole = allocator.record(random_trace(3000), capacity=500 * 2**20)
    cli.main(["replay", str(allocator.Snapshot(whole.segments, []).save(tmp_path / "t.pickle"))])
    said = capsys.readouterr().out
    live = sum(segment["requested_size"] for segment in whole.segments)
    assert said.startswith(f"live at the end: {live:,} bytes in ") and f"{whole.reserved:,} bytes reserved, " in said


def test_a_replay_says_when_no_setting_can_help(tmp_path, capsys):
    trace = random_trace(3000)
    path = allocator.record(trace).save(tmp_path / "s.pickle")
    cli.main(["replay", str(path), "--capacity", str(trace.peak - 1000)])
    said = capsys.readouterr().out
    assert f"no setting can help: {trace.peak:,} bytes are live at once, so 1,000 bytes must go" in said
    assert said.startswith("live at the peak: ")
