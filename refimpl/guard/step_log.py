"""One line of JSON for each step, written as the step ends: a process that is killed leaves its last one.

    rank0.steps.jsonl        {"step": 12, "seconds": 0.31, "batch": …, "parameters": …, "peak": …, "phases": …}

At LIMIT bytes the file becomes rank0.steps.1.jsonl, in place of the one before, so that two stay; the next one begins
with who writes it, and what failed. What an earlier run has left moves to earlier/1, earlier/2 …: nothing is written
over.
"""

import json
import os
import time
from pathlib import Path

import psutil

from ..untrusted.files import opened

LIMIT = 2**23  # bytes of a file
KEPT = 100  # lines of failures that each file has


class StepLog:
    """Writes the lines of one rank of `world`. OSError, at once, where the folder cannot be written."""

    def __init__(self, folder, rank, world=1):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = f"rank{rank}"
        if _is_in_use(self.path):  # by another process that calls itself so
            self.name += f".{os.getpid()}"
        _set_aside(self.folder, self.name)
        if rank == 0:
            _set_aside_more(self.folder, world)
        self._file, self.why_not, self._kept = open(self.path, "wb", buffering=0), "", []
        self.write({"process": os.getpid(), "born": psutil.Process().create_time(), "began": time.time()})

    @property
    def path(self):
        """Return the path of the file."""
        return self.folder / f"{self.name}.steps.jsonl"

    def write(self, found):
        """Write one line. Where that fails, as on a full disk, `why_not` says why, and the next line is tried."""
        if "process" in found or "failed" in found:
            self._kept = [*self._kept[:KEPT], found]
        try:
            self._file.write(_line(found))
            if self._file.tell() > LIMIT:
                os.replace(self.path, self.folder / f"{self.name}.steps.1.jsonl")
                before, self._file = self._file, open(self.path, "wb", buffering=0)
                before.close()
                self._file.write(b"".join(map(_line, self._kept)))
        except OSError as error:
            self.why_not = str(error)

    def close(self, how):
        """Write how the run ended, and close the file."""
        self.write({"ended": how, "at": time.time()})
        self._file.close()


def _line(found):
    return (json.dumps(found, separators=(",", ":")) + "\n").encode()


def lines(path):
    """List the dicts of a file; the last line, cut where a process was killed while it wrote, is left out."""
    found = []
    with opened(path, 2 * LIMIT) as file:
        text = file.read().decode("utf-8", "replace")
    for line in text.splitlines():
        try:
            each = json.loads(line)
        except ValueError:
            continue
        if isinstance(each, dict):
            found.append(each)
    return found


def _is_in_use(path):
    """Tell whether a process that lives, and is not this one, writes a log."""
    if not path.exists():
        return False
    first = (lines(path) or [{}])[0]
    try:
        return first.get("process") != os.getpid() and "ended" not in lines(path)[-1] and (
            psutil.Process(first["process"]).create_time() == first["born"])
    except (psutil.Error, KeyError, TypeError, ValueError, IndexError):
        return False


def _set_aside(folder, name):
    left = sorted(folder.glob(f"{name}.[!0-9]*"))  # not those of a process that has its number in the name
    if left:
        number = next(n for n in range(1, 10**6) if not list((folder / "earlier" / str(n)).glob(f"{name}.*")))
        (folder / "earlier" / str(number)).mkdir(parents=True, exist_ok=True)
        for path in left:
            os.replace(path, folder / "earlier" / str(number) / path.name)


def _set_aside_more(folder, world):
    """Set aside what an earlier run of more ranks has left, which would stand among this one's."""
    for path in folder.glob("rank*.steps.jsonl"):
        name = path.name.removesuffix(".steps.jsonl")
        if name.removeprefix("rank").isdecimal() and int(name[4:]) >= world and not _is_in_use(path):
            _set_aside(folder, name)
