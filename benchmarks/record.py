"""A measurement as a file: data/measurements/<device>/<name>.json, written by machines and read by notebooks.

    {"name": …, "device": {"slug", "name", "memory_bytes", "cpus"}, "versions": {…}, "commit": …, "date": …,
     "settings": {…}, "rows": [{"what", "peer", "unit", "value", "peer_value", "ratio", …}, …]}

A bench that is still running, or was interrupted, has a <name>.partial.json with the rows measured so far.
"""

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

CHECKOUT = Path(__file__).parents[1]
FOLDER = CHECKOUT / "data" / "measurements"


def row(what, peer, unit, value, peer_value, **more):
    """Make one row of a record: `value` of `what` beside `peer_value` of `peer`, both in `unit`, and their ratio.

    None stands for a value that cannot be measured here. `more` explains the row: `spread=…`, for example, or
    `items={name: bytes}`, the parts of a difference.
    """
    ratio = value / peer_value if peer_value and value is not None else None
    return {"what": what, "peer": peer, "unit": unit, "value": value, "peer_value": peer_value, "ratio": ratio, **more}


def describe(name, settings, rows, device):
    """Make the whole record, a dict that JSON can hold. `device`: the measured device, `"cpu"` or `"cuda"`."""
    return {"name": name, "device": device_facts(device), "versions": versions(), "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"), "settings": settings, "rows": rows}


def write(record, folder=None, partial=False):
    """Write `record` below `folder` (default: the checkout's data/measurements). Returns the Path.

    - `partial`: more rows will follow. The file is then <name>.partial.json, and the complete record replaces it. Until
      then, an older complete record stays.

    The file is replaced in one step, so it is valid at any time, even if the run is killed. Raises FileNotFoundError if
    there is no checkout and no folder is given.
    """
    if folder is None and not (CHECKOUT / "pyproject.toml").exists():
        raise FileNotFoundError(f"refimpl does not run from a checkout ({CHECKOUT}): name a folder to write to (--out)")
    whole = Path(folder or FOLDER) / record["device"]["slug"] / f"{record['name']}.json"
    unfinished = whole.with_suffix(".partial.json")
    whole.parent.mkdir(parents=True, exist_ok=True)
    path = unfinished if partial else whole
    being_written = whole.with_suffix(".written")
    being_written.write_text(json.dumps(record, indent=1) + "\n")
    being_written.replace(path)
    if not partial:
        unfinished.unlink(missing_ok=True)
    return path


def measurement(name, device=None, folder=None, partial=False):
    """Return the record of bench `name`, a dict, or None if it was not measured yet (or there is no checkout).

    - `device`: its slug or full name (`"cpu"`, `"nvidia-h200"`, `"NVIDIA H200"`). By default the newest of all devices.
    - `partial`: if there is no complete record, return the rows of an interrupted run.

    Raises ValueError for a file that is not a record.
    """
    for suffix in (".json", ".partial.json")[: 1 + partial]:
        paths = sorted(Path(folder or FOLDER).glob(f"{slug(device) if device else '*'}/{name}{suffix}"))
        records = [_dated(path) for path in paths]
        if records:
            return max(records, key=lambda dated: dated[0])[1]
    return None


def measurements(name, folder=None, partial=False):
    """Return {device: record} of bench `name`, for each device that was measured, the CPU first.

    Arguments and errors are those of `measurement`.
    """
    devices = sorted((path.name for path in Path(folder or FOLDER).glob("*") if path.is_dir()),
                     key=lambda device: (device != "cpu", device))
    return {device: record for device in devices if (record := measurement(name, device, folder, partial))}


def _dated(path):
    """Return (date, record) of a file."""
    try:
        record = json.loads(path.read_text())
        return datetime.fromisoformat(record["date"]), record
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a measurement: {error!r}; record it again (--record)") from error


def slug(name):
    """Return a device's name as part of a path: `NVIDIA H200` → `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def cores():
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_facts(device):
    """Return slug, full name and memory in bytes of the device, and the number of CPUs this process may use."""
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"slug": slug(properties.name), "name": properties.name, "memory_bytes": properties.total_memory,
                "cpus": cores()}
    return {"slug": "cpu", "name": processor(), "memory_bytes": psutil.virtual_memory().total, "cpus": cores()}


def processor():
    """Return the processor's model name."""
    facts = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", facts.read_text(), re.MULTILINE) if facts.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def versions():
    """Return the versions that a measurement depends on: python, torch, and cuda, triton and refimpl if installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
             "triton": _installed("triton"), "refimpl": _installed("refimpl")}
    project = CHECKOUT / "pyproject.toml"
    if found["refimpl"] is None and project.exists():  # run from a checkout that was never installed
        found["refimpl"] = tomllib.loads(project.read_text())["project"]["version"]
    return {name: version for name, version in found.items() if version}


def _installed(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit():
    """Return the checkout's commit, with `+dirty` if refimpl/ differs from it; None without git or a checkout."""
    if not (CHECKOUT / ".git").exists():
        return None
    try:
        head, changed = (subprocess.run(["git", *command], cwd=CHECKOUT, capture_output=True, text=True, check=True)
                         for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "refimpl"]))
    except (FileNotFoundError, subprocess.CalledProcessError):  # git is missing, or refuses this repository
        return None
    return head.stdout.strip() + ("+dirty" if changed.stdout.strip() else "")
