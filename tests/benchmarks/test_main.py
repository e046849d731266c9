"""The command line: which bench, what it prints, what it writes, what it refuses."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import NAMES, __main__, record


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """Replaces every bench by one that takes no time, and where records are; fills with the devices it was run on."""
    devices = []
    monkeypatch.setattr(record, "FOLDER", tmp_path / "measurements")

    def run(device):
        devices.append(device)
        rows = [record.row("tracked step", "untracked step", "s", 0.1234567, 0.1),
                record.row("peak", "allocator", "bytes", 1234567, 1234568),
                record.row("net", "allocator", "bytes", 0, 0)]
        return {"rounds": 1}, rows

    for name in NAMES:
        monkeypatch.setattr(importlib.import_module(f"benchmarks.{name}"), "run", run)
    return devices


def test_a_bench_prints_medians_and_ratios_and_writes_nothing(ran, capsys, tmp_path):
    __main__.main(["meter"])
    title, head, step, peak, net = capsys.readouterr().out.splitlines()
    assert title.startswith("meter on ") and "torch" in title
    assert step.split() == "tracked step 0.1235 s untracked step 0.1 s 1.2346".split()
    assert peak.split() == "peak 1,234,567 bytes allocator 1,234,568 bytes 1.0000".split()
    assert net.split()[-1] == "-"
    assert len({len(line) for line in (head, step, peak, net)}) == 1, "the columns are not aligned"
    assert list(tmp_path.iterdir()) == []


def test_record_writes_and_out_says_where(ran, capsys, tmp_path):
    __main__.main(["meter", "--record"])
    (path,) = (tmp_path / "measurements").glob("*/meter.json")
    assert f"written to {path}" in capsys.readouterr().out
    assert json.loads(path.read_text())["settings"] == {"rounds": 1}
    __main__.main(["meter", "--record", "--out", str(tmp_path / "elsewhere")])
    assert list((tmp_path / "elsewhere").glob("*/meter.json"))


def test_a_bench_that_raises_keeps_its_rows_and_ends_no_other(ran, capsys, monkeypatch, tmp_path):
    def rows():
        yield record.row("first", "peer", "s", 1.0, 1.0)
        assert [row["what"] for row in record.measurement("comm", "cpu", tmp_path, partial=True)["rows"]] == ["first"]
        raise ValueError("no such kernel")

    module = importlib.import_module("benchmarks.comm")
    monkeypatch.setattr(module, "run", lambda device: ({"rounds": 1}, rows()))
    with pytest.raises(SystemExit, match="comm: ended by the error above; rows read before it are in NAME.partial"):
        __main__.main(["all", "--record", "--out", str(tmp_path)])
    assert len(ran) == len(NAMES) - 1
    assert sorted(path.name for path in tmp_path.glob("*/*")) == sorted(
        f"{name}.partial.json" if name == "comm" else f"{name}.json" for name in NAMES)
    said = capsys.readouterr()
    assert "first  1 s  peer" in said.out and "ValueError: no such kernel" in said.err


@pytest.mark.parametrize(("said", "where"), [
    ({}, "cuda"), ({"tokens on": "cpu"}, "cpu"), ({"tokens on": "cuda"}, "cuda"),
    ({"tensors on": {"2": "cpu", "4": "cpu"}}, "cpu"), ({"tensors on": {"1": "cuda", "4": "cpu"}}, "cuda")])
def test_a_record_is_filed_under_the_device_that_the_ranks_were_on(said, where):
    """Of four ranks on a machine with one GPU it is the CPU's, not the GPU's."""
    assert __main__.where_it_ran({"rounds": 1, **said}, "cuda") == where


def test_all_runs_every_bench(ran):
    __main__.main(["all"])
    assert len(ran) == len(NAMES)


def test_help_describes_every_bench(capsys):
    with pytest.raises(SystemExit):
        __main__.main(["--help"])
    said = capsys.readouterr().out
    assert all(f"  {name:<14} {line}\n" in said for name, line in NAMES.items()) and "  all " in said


def test_an_unknown_bench_lists_the_known_ones():
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "benchmarks", "metre"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 2
    assert all(name in done.stderr.splitlines()[-1] for name in ("'metre'", "meter", "all"))


@pytest.mark.parametrize(("arguments", "message"), [([], "NAME"), (["meter", "--out", "x"], "--record")])
def test_what_makes_no_sense_is_refused(ran, capsys, arguments, message):
    with pytest.raises(SystemExit):
        __main__.main(arguments)
    assert message in capsys.readouterr().err
    assert not ran
