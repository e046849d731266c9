"""Which line of the program asked for something: frames are walked only when that must be said."""

import linecache
import os
import sys
import sysconfig
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_MEMORY = str(Path(__file__).parents[1]) + os.sep
_METERS = _MEMORY, str(Path(__file__).parents[2] / "common") + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_STANDARD = sysconfig.get_path("stdlib") + os.sep


@dataclass(frozen=True)
class Place:
    """A line of source: its file, its number, the expression on it that was being computed, and its function."""

    path: str
    line: int
    expression: str
    function: str = ""  # with its class, "Experts.forward"

    def __str__(self):
        library = next((path for path in _LIBRARIES if self.path.startswith(path)), None)
        return f"{self.path.removeprefix(library) if library else os.path.basename(self.path)}:{self.line}"

    def matches(self, key):
        """Tell whether `key` names this line, `"train.py:31"` or `"models/moe.py:31"`, or the function that it is in,
        `"moe.py:forward"` or `"moe.py:Experts.forward"`: other versions of a library have other lines."""
        path, _, at = key.rpartition(":")
        here = str(self.line) == at or f".{self.function}".endswith(f".{at}")
        return here and f"/{self.path}".endswith(f"/{path}")

    @property
    def is_of_the_meters(self):
        """Tell whether the line is in refimpl.memory, or in what that imports."""
        return self.path.startswith(_METERS)

    @property
    def is_of_the_program(self):
        """Tell whether the line is neither PyTorch's, nor Python's, nor that of the meters."""
        if self.path.startswith(_LIBRARIES):
            return not self.path.startswith((_TORCH, *_METERS))
        return not self.path.startswith((_TORCH, *_METERS, _STANDARD, "<frozen"))


def running():
    """Yield the places that run now, innermost first, up to the dry run's own."""
    frame = sys._getframe(1)
    while frame is not None and not _begins_the_dry_run(frame):
        yield _place(frame, frame.f_lineno, frame.f_lasti)
        frame = frame.f_back


def raised(error):
    """List the places in the traceback of `error`, innermost first, up to the dry run's own."""
    found, at = [], error.__traceback__
    while at is not None:
        found = [] if _begins_the_dry_run(at.tb_frame) else [_place(at.tb_frame, at.tb_lineno, at.tb_lasti), *found]
        at = at.tb_next
    return found


def of_the_program(places):
    """Return the first place of the user's or of a model library's, or else PyTorch's."""
    places = list(places)
    outer = [place for place in places if not place.is_of_the_meters]
    return next((place for place in places if place.is_of_the_program), (outer or places or [Place("?", 0, "")])[0])


def _begins_the_dry_run(frame):
    return frame.f_code.co_name == "dry_run" and frame.f_code.co_filename.startswith(_MEMORY)


def _place(frame, line, instruction):
    path, positions = frame.f_code.co_filename, (None,) * 4
    if instruction >= 0:
        positions = list(frame.f_code.co_positions())[instruction // 2]
    first, last, begin, end = positions  # the columns are in bytes
    if None in positions:
        text = linecache.getline(path, line, frame.f_globals)
    else:
        lines = [linecache.getline(path, number, frame.f_globals).encode() for number in range(first, last + 1)]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][begin:]
        ends = [number for number, text in enumerate(lines) if text.rstrip().endswith(b":")]  # of an `if`, not its body
        lines = lines[:ends[0] + 1] if ends else lines
        text = b" ".join(lines).decode(errors="replace")
    function = frame.f_code.co_qualname.replace(".<locals>", "")
    return Place(path, line, textwrap.shorten(text, 120, placeholder=" …"), function)
