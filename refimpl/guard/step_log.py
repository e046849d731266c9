"""One line of JSON for each step, written as the step ends: a process that is killed leaves its last one.

    rank0.steps.jsonl        {"step": 12, "seconds": 0.31, "batch": …, "parameters": …, "peak": …, "phases": …}

At LIMIT bytes the file becomes rank0.steps.1.jsonl, in place of the one before, so that two stay. What an earlier run
has left moves to earlier/1, earlier/2 …: nothing is written over.
"""

import json
import os
import time
from pathlib import Path

import psutil

LIMIT = 2**23  # bytes of a file


class StepLog:
    """Writes the lines of one rank. OSError, at once, where the folder cannot be written."""

    def __init__(self, folder, rank):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.name = f"rank{rank}"
        if _is_in_use(self.path):  # by another process that calls itself so
            self.name += f".{os.getpid()}"
        _set_aside(self.folder, self.name)
        self._file, self.why_not = open(self.path, "wb", buffering=0), ""
        self.write({"process": os.getpid(), "born": psutil.Process().create_time(), "began": time.time()})

    @property
    def path(self):
        """Return the path of the file."""
        return self.folder / f"{self.name}.steps.jsonl"

    def write(self, found):
        """Write one line. Where that fails, as on a full disk, `why_not` says why, and the next line is tried."""
        try:
            self._file.write((json.dumps(found, separators=(",", ":")) + "\n").encode())
            if self._file.tell() > LIMIT:
                self._file.close()
                os.replace(self.path, self.folder / f"{self.name}.steps.1.jsonl")
                self._file = open(self.path, "wb", buffering=0)
        except OSError as error:
            self.why_not = str(error)

    def close(self, how):
        """Write how the run ended, and close the file."""
        self.write({"ended": how, "at": time.time()})
        self._file.close()


def lines(path):
    """List the dicts of a file; the last line, cut where a process was killed while it wrote, is left out."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
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
