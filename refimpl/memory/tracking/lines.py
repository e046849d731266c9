"""Which line of the program runs: found for every tensor that is made, so it has to be cheap.

Frames are walked from an operation outwards, past PyTorch's and the meters' to the first of a library's (the `source`)
and on to the first of the user's own (the `line`). A module that runs remembers the line that called it, so a walk is
as long as what lies between an operation and the innermost module, however deep that is.

In backward there is no such frame. But autograd numbers its nodes as forward makes them, so what a node allocates in
backward belongs to the line that ran when its number was given. Frames of a user's own hook or Function come first.
"""

import functools
import linecache
import os
import sys
import sysconfig
import textwrap
from bisect import bisect_right
from pathlib import Path

import torch

from ..storage_records import Line
from .in_place import WatchedEngine

_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_INNER = (str(Path(torch.__file__).parent) + os.sep, *(f"{_PACKAGE}{name}{os.sep}" for name in ("memory", "common")))
_SITES = tuple({sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")})
_STANDARD = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})
INNER, LIBRARY, USER = 0, 1, 2  # PyTorch, Python and the meters; other libraries, refimpl among them; the program

_MODULE_CALL = torch.nn.Module._call_impl.__code__
_ENGINE = WatchedEngine.run_backward.__code__
_NUMBER = torch._C._autograd._get_sequence_nr
_kinds = {}  # file name of code -> kind; "<string>" is not among them
_FOLDERS = {**dict.fromkeys(_STANDARD, INNER), **dict.fromkeys((*_SITES, _PACKAGE), LIBRARY)}
_own = {}  # the folder of the program that runs, and its file -> USER


def _learn(frame):
    """Return whose code runs in a frame, INNER, LIBRARY or USER, and remember it."""
    path = frame.f_code.co_filename
    if path == "<string>":  # `python -c`, or what dataclasses and the like wrote
        return USER if frame.f_globals.get("__name__") == "__main__" else INNER
    _kinds[path] = kind_of(path)
    return _kinds[path]


def kind_of(path):
    """Return whose a file of code is: INNER, LIBRARY or USER."""
    if path.startswith(_INNER) or "torchinductor_" in path or (path.startswith("<") and path != "<stdin>"):
        return INNER
    homes = {**_FOLDERS, **_own}
    home = max((each for each in homes if path.startswith(each)), key=len, default="")
    if f"{os.sep}site-packages{os.sep}" in f"{os.sep}{path.removeprefix(home)}":
        return LIBRARY
    return homes.get(home, USER)


def users(frames):
    """Return the first of some (frame, line) that is the program's, not a library's; None if there is none."""
    return next((each for each in frames if kind_of(each[0].f_code.co_filename) == USER), None)


def begin_program(path):
    """Count the script or module `path`, and what lies beside it, as the user's: among libraries, too. A library that
    lies below, as in a project's virtual environment, stays one; so do those beside a file that is no package's."""
    _own.clear()
    for each in (os.path.abspath(path), os.path.realpath(path)):
        folder = os.path.dirname(each) + os.sep
        alone = folder in _STANDARD or os.path.basename(folder[:-1]) in ("site-packages", "dist-packages")
        _own[each if alone else folder] = USER
    _own[str(path)] = USER
    _kinds.clear()
    line_of.cache_clear()  # the file may have been edited since a program ran in this process, or be another's
    linecache.checkcache()


@functools.lru_cache(2**16)
def line_of(path, number):
    """Return the Line of a file and a number, its text as it is now."""
    return Line(_shown(path), number, textwrap.shorten(linecache.getline(path, number), 100, placeholder=" …"))


def _shown(path):
    """Return a path that is the same on every machine: from the library's folder, from here, or a cell's number."""
    library = next((site for site in (*_SITES, str(Path(_PACKAGE).parent) + os.sep) if path.startswith(site)), None)
    here = os.getcwd() + os.sep
    if library and (library in _SITES or path.startswith(_PACKAGE)):
        return path.removeprefix(library)
    if path.startswith(here):
        return path.removeprefix(here)
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = getattr(getattr(shell, "compile", None), "_filename_map", {}).get(path)
    return f"In[{cell}]" if cell is not None else os.path.basename(path)


class Lines:
    """The lines of one tracker."""

    def __init__(self):
        self._calls = []  # of the modules that run, outermost first: (id of the frame, line, source)
        self._numbers, self._found = [0], [(None, None)]  # from this node of autograd's on: that line, that source
        self._number = 0  # the next node's

    def enter_module(self):
        """Remember the line that calls a module; called from a hook of the module's."""
        frame = sys._getframe(2)
        while frame is not None and frame.f_code is not _MODULE_CALL:
            frame = frame.f_back
        self._calls.append((id(frame), *self._walk(frame and frame.f_back)))

    def leave_module(self, depth):
        """Forget all but the `depth` outermost."""
        del self._calls[depth:]  # several at once if one of them raised

    def made_a_node(self):
        """Tell whether autograd made a node since the last call of `now`."""
        return _NUMBER() != self._number

    def now(self):
        """Return (line, source) of the operation that ran just now, and note it for the node that it made."""
        found, number = self._walk(sys._getframe(3)), _NUMBER()
        if number != self._number:
            if self._found[-1] != found:
                self._numbers.append(self._number)
                self._found.append(found)
            self._number = number
        return found

    def _walk(self, frame):
        """Return (line, source) from `frame` outwards; at autograd's engine those of the running node, if any."""
        called, of_call, source_of_call = self._calls[-1] if self._calls else (None, None, None)
        source, kinds = None, _kinds
        while frame is not None:  # on every operation's way
            if id(frame) == called:
                return of_call, source or source_of_call
            code = frame.f_code
            kind = kinds.get(code.co_filename)
            if kind is None:
                kind = _learn(frame)
            if kind:
                if kind == USER:
                    found = line_of(code.co_filename, frame.f_lineno)
                    return found, source or found
                if source is None:
                    source = line_of(code.co_filename, frame.f_lineno)
            elif code is _ENGINE:
                line, source_of_node = self._of_node()
                if line is not None:
                    return line, source or source_of_node
            frame = frame.f_back
        line, source_of_node = self._of_node()  # on a thread of autograd's own
        return line, source or source_of_node

    def _of_node(self):
        """Return the (line, source) at which forward made the autograd node that runs."""
        node = torch._C._current_autograd_node()
        number = 2**63 if node is None else node._sequence_nr()
        if number >= 2**63:  # the node that accumulates a gradient has no place in the order
            return None, None
        return self._found[bisect_right(self._numbers, number) - 1]
