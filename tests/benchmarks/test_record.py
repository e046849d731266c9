"""Measurements as files: what is written is what is read, and what is not there reads None."""

import importlib.metadata
import json
import platform
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch

from benchmarks import measurement, measurements, record

ROOT = Path(__file__).parents[2]
ROWS = [record.row("ours", "theirs", "s", 3.0, 2.0, spread=0.1), record.row("net", "allocator", "bytes", 0, 0)]


def reading(name="meter", device="cpu", date=None):
    found = record.describe(name, {"batch": 4}, ROWS, "cpu")
    found["device"]["slug"] = device
    return {**found, "date": date or found["date"]}


def test_what_is_written_is_what_is_read(tmp_path):
    written = reading()
    path = record.write(written, tmp_path)
    assert path == tmp_path / "cpu" / "meter.json"
    assert measurement("meter", folder=tmp_path) == measurement("meter", "cpu", tmp_path) == written


def test_what_is_partly_read_stands_beside_an_older_whole_record_until_it_is_whole(tmp_path):
    older, newer = reading(date="2026-01-01T00:00:00+00:00"), reading(date="2026-02-01T00:00:00+00:00")
    record.write(older, tmp_path)
    path = record.write({**newer, "rows": ROWS[:1]}, tmp_path, partial=True)
    assert path == tmp_path / "cpu" / "meter.partial.json"
    assert measurement("meter", folder=tmp_path) == measurement("meter", folder=tmp_path, partial=True) == older
    record.write(newer, tmp_path)
    assert measurement("meter", folder=tmp_path) == newer
    assert sorted(path.name for path in (tmp_path / "cpu").iterdir()) == ["meter.json"]


def test_a_partial_record_is_read_if_it_is_asked_for_and_nothing_whole_is_there(tmp_path):
    record.write(reading(), tmp_path, partial=True)
    assert measurement("meter", folder=tmp_path) is None
    assert measurement("meter", folder=tmp_path, partial=True)["rows"] == ROWS


def test_a_record_that_cannot_be_written_leaves_the_one_before(tmp_path):
    record.write(reading(), tmp_path)
    with pytest.raises(TypeError):
        record.write({**reading(), "rows": [object()]}, tmp_path)
    assert measurement("meter", folder=tmp_path)["rows"] == ROWS


def test_the_records_of_the_cpu_and_of_every_gpu(tmp_path):
    assert measurements("meter", tmp_path) == {}
    for device in ("cpu", "nvidia-h200", "a-gpu"):
        record.write(reading(device=device), tmp_path)
    record.write(reading("other", "nvidia-h100"), tmp_path)
    found = measurements("meter", tmp_path)
    assert list(found) == ["cpu", "a-gpu", "nvidia-h200"]
    assert all(record["device"]["slug"] == device for device, record in found.items())
    assert measurements("other", tmp_path) == {"nvidia-h100": reading("other", "nvidia-h100") | {
        "date": measurement("other", folder=tmp_path)["date"]}}


def test_a_row_holds_the_ratio_of_its_values():
    assert ROWS[0] == {"what": "ours", "peer": "theirs", "unit": "s", "value": 3.0, "peer_value": 2.0, "ratio": 1.5,
                       "spread": 0.1}
    assert ROWS[1]["ratio"] is None
    for value, peer_value in ((1.0, None), (None, 1.0), (None, None)):
        assert record.row("ours", "theirs", "s", value, peer_value)["ratio"] is None


def test_the_newest_of_any_device_is_found_or_the_one_asked_for(tmp_path):
    for device, date in (("a-gpu", "2026-02-01T00:00:00+00:00"), ("cpu", "2026-01-31T23:59:59+00:00"),
                         ("nvidia-h200", "2026-02-01T00:30:00+01:00")):
        record.write(reading(device=device, date=date), tmp_path)
    record.write(reading("other", date="2027-01-01T00:00:00+00:00"), tmp_path)
    assert measurement("meter", folder=tmp_path)["device"]["slug"] == "a-gpu"
    assert measurement("meter", "NVIDIA H200", tmp_path)["device"]["slug"] == "nvidia-h200"


def test_what_was_not_measured_is_none(tmp_path):
    record.write(reading(), tmp_path)
    assert measurement("meter", "nvidia-h200", tmp_path) is None
    assert measurement("attention", folder=tmp_path) is None
    assert measurement("meter", folder=tmp_path / "nowhere") is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"date": "yesterday"}'])
def test_a_file_that_is_no_record_is_named(tmp_path, text):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "meter.json").write_text(text)
    with pytest.raises(ValueError, match=r"cpu.meter\.json is not a measurement"):
        measurement("meter", folder=tmp_path)


def test_a_record_says_where_when_and_with_what(monkeypatch):
    found = reading()
    assert set(found) == {"name", "device", "versions", "commit", "date", "settings", "rows"}
    assert found["device"]["name"] and found["device"]["memory_bytes"] > 2**28 and found["device"]["cpus"] >= 1
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["refimpl"] == importlib.metadata.version("refimpl")
    assert found["date"].endswith("+00:00")
    assert json.loads(json.dumps(found)) == found
    monkeypatch.setattr(record, "_installed", lambda package: None)  # as `make gpu` runs, with nothing installed
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert record.versions()["refimpl"] == project["version"] and "triton" not in record.versions()


def test_slugs():
    assert record.slug("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"
    assert record.slug("AMD Instinct(tm) MI300X ") == "amd-instinct-tm-mi300x"


def test_an_installed_package_has_nothing_to_read_and_nowhere_to_write(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "CHECKOUT", tmp_path)
    monkeypatch.setattr(record, "FOLDER", tmp_path / "data" / "measurements")
    assert measurement("meter") is None
    assert record.commit() is None
    with pytest.raises(FileNotFoundError, match="--out"):
        record.write(reading())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_commit_is_that_of_the_checkout_and_says_if_the_code_differs(tmp_path, monkeypatch):
    def git(*command):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    monkeypatch.setattr(record, "CHECKOUT", tmp_path)
    (tmp_path / "refimpl").mkdir()
    (tmp_path / "refimpl" / "model.py").write_text("1\n")
    git("init", "-q")
    assert record.commit() is None  # nothing was committed yet
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "reading.json").write_text("{}")  # what another bench has just written
    assert record.commit() == git("rev-parse", "HEAD")
    (tmp_path / "refimpl" / "model.py").write_text("2\n")
    assert record.commit() == git("rev-parse", "HEAD") + "+dirty"
    monkeypatch.setenv("PATH", "")
    assert record.commit() is None


def test_what_the_checkout_has_recorded_can_be_read():
    for path in record.FOLDER.glob("*/*.json"):
        name = path.stem.removesuffix(".partial")
        found = measurement(name, path.parent.name, partial=True)
        assert found["name"] == name and found["device"]["slug"] == path.parent.name
        for row in found["rows"]:
            assert {"what", "peer", "unit", "value", "peer_value", "ratio"} <= set(row)
