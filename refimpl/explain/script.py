"""Run a script as `python SCRIPT args` would: as `__main__`, with its own arguments, folder and exit status."""

import io
import os
import runpy
import sys
import traceback
import types
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .steps import StepsDone

if TYPE_CHECKING:
    from os import PathLike

_REFIMPL = str(Path(__file__).resolve().parents[1]) + os.sep
_OURS = (*(_REFIMPL + name for name in ("explain", "rehearse", "phantom", "memory", "cli.py", "__main__.py")),
         "<frozen runpy>")


@dataclass(frozen=True)
class Ending:
    """How a script ended. `how`: "steps" (ended by the count), "end", "exit", "error" or "interrupt".

    `status`: the exit status that Python would have given. `text`: what it would have written to stderr, without the
    frames of refimpl. `words`: the last line of that. `error`: what was raised, if it failed.
    """

    how: str
    status: int = 0
    text: str = ""
    words: str = ""
    error: BaseException | None = None


class Script:
    """A script and its arguments. FileNotFoundError or IsADirectoryError, with the path, where there is none."""

    def __init__(self, path: "str | PathLike[str]", arguments: Sequence[str] = ()) -> None:
        self.path, self.arguments, self.name = check_file(path), [*map(str, arguments)], str(path)

    def run(self) -> Any:
        """Run it in this process, to its end or a StepsDone, and return its Ending. Nothing is raised."""
        return ending(self._run)

    def _run(self):
        with _as_main(self.path, self.arguments) as module:
            with io.open_code(self.path) as file:
                code = compile(file.read(), self.path, "exec")
            exec(code, module.__dict__)


class Function:
    """A function without arguments in a file, as "steps.py:step". Errors as those of Script; ValueError without ":"."""

    def __init__(self, name: str, folder: "str | PathLike[str]" = ".") -> None:
        path, colon, function = name.rpartition(":")
        if not colon or not function.isidentifier():
            raise ValueError(f"{name!r}: expected a file and a function in it, as \"steps.py:step\"")
        self.path, self.function, self.name = check_file(Path(folder) / path), function, name

    def run(self) -> Any:
        """Run its file, not as `__main__`, then the function; see Script.run."""
        return ending(self._run)

    def _run(self):
        sys.path.insert(0, os.path.dirname(os.path.realpath(self.path)))
        found = runpy.run_path(self.path, run_name=Path(self.path).stem).get(self.function)
        if not callable(found):
            raise SystemExit(f"{self.path} has no function {self.function}: expected one that takes no arguments and "
                             "trains")
        found()


def check_file(path):
    """Return `path` as a str, if it is a file. FileNotFoundError or IsADirectoryError if it is not."""
    if Path(path).is_dir():
        raise IsADirectoryError(f"{path} is a folder: expected a script of Python")
    if not Path(path).is_file():
        raise FileNotFoundError(f"no file {path}: expected a script of Python")
    return str(path)


def ending(action):
    """Call `action`, and return how it ended."""
    try:
        action()
    except StepsDone:
        return Ending("steps")
    except SystemExit as error:
        return _exited(error.code)
    except KeyboardInterrupt as error:
        return Ending("interrupt", 130, own_traceback(error), "KeyboardInterrupt")
    except BaseException as error:
        text = own_traceback(error)
        return Ending("error", 1, text, text.strip().rpartition("\n")[2], error)
    return Ending("end")


def _exited(code):
    """What `sys.exit(code)` means: a number is the status; anything else is written, and the status is 1."""
    if code is None or isinstance(code, int):
        return Ending("exit", int(code or 0) & 0xFF)
    return Ending("exit", 1, f"{code}\n", str(code))


@contextmanager
def _as_main(path, arguments):
    """Be `__main__`. It stays so after the script, for what runs at exit and for processes that are started then."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __package__=None)
    argv, search = sys.argv, sys.path[:]
    sys.modules["__main__"] = module
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        yield module
    finally:
        sys.argv, sys.path[:] = argv, search


def own_traceback(error):
    """Write the traceback of `error` and of what caused it, without the frames of refimpl's runner and meters. Where
    one of these raised, all stay: the fault may be ours."""
    written = traceback.TracebackException.from_exception(error)
    todo, seen = [written], set()
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        innermost = each.stack[-1].filename if each.stack else ""
        if not innermost.startswith(_OURS) or innermost == __file__:  # this file raises what the script's text is worth
            each.stack = traceback.StackSummary.from_list([f for f in each.stack if not f.filename.startswith(_OURS)])
        todo += [each.__cause__, each.__context__, *(each.exceptions or ())]
    return "".join(written.format())
