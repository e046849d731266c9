"""`python -m refimpl`: it says what there is, and does what the modules' own commands do."""

import importlib
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from refimpl import cli
from refimpl.bench import NAMES, record

ROOT = Path(__file__).parent.parent


def test_without_a_command_it_says_what_there_is():
    done = subprocess.run([sys.executable, "-m", "refimpl"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "usage: python -m refimpl" in done.stdout and "bench" in done.stdout and "make lab" in done.stdout


def test_the_installed_command_is_the_same(monkeypatch, capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert pkgutil.resolve_name(project["scripts"]["refimpl"]) is cli.main
    monkeypatch.setattr(sys, "argv", ["/usr/bin/refimpl"])
    cli.main([])
    assert capsys.readouterr().out.startswith("usage: refimpl [-h]")


def test_bench_runs_a_bench(monkeypatch, capsys):
    rows = [record.row("ours", "theirs", "s", 1.0, 2.0)]
    monkeypatch.setattr(importlib.import_module("refimpl.bench.comm"), "run", lambda device: ({}, rows))
    cli.main(["bench", "comm"])
    assert capsys.readouterr().out.splitlines()[-1].split() == "ours 1 s theirs 2 s 0.5000".split()


def test_its_help_describes_every_bench(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--help"])
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert done.value.code == 0 and [[name, line] for name, line in NAMES.items()] == lines[-len(NAMES) - 1 : -1]


@pytest.mark.parametrize(("arguments", "message"), [
    (["benhc"], "invalid choice: 'benhc'"), (["bench"], "NAME"), (["bench", "comm", "--out", "x"], "give both")])
def test_what_makes_no_sense_is_refused(capsys, arguments, message):
    with pytest.raises(SystemExit) as done:
        cli.main(arguments)
    assert done.value.code == 2 and message in capsys.readouterr().err
