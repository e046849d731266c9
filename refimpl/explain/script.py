"""Run a script as `python SCRIPT args` would: as `__main__`, with its own arguments, folder and exit status."""

import importlib.util
import io
import os
import runpy
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..memory.tracking.lines import begin_program
from .steps import StepsDone

if TYPE_CHECKING:
    from os import PathLike

_REFIMPL = str(Path(__file__).resolve().parents[1]) + os.sep
_OURS = (*(_REFIMPL + name for name in ("explain", "guard", "rehearse", "phantom", "memory", "cli.py", "__main__.py")),
         "<frozen runpy>")


@dataclass(frozen=True)
class Ending:
    """How a script ended. `how`: "steps" (ended by the count), "end", "exit", "error" or "interrupt".

    `status`: the exit status that Python would have given. `text`: what it would have written to stderr, without the
    frames of refimpl. `words`: that in one line. `error`: what was raised, if it failed.
    """

    how: str
    status: int = 0
    text: str = ""
    words: str = ""
    error: BaseException | None = None


class Script:
    """A script and its arguments. FileNotFoundError or IsADirectoryError, with the path, where there is none.

    `environment`: variables that it finds. `notes`: sentences on how it is run, as without others of its ranks.
    """

    environment: Mapping[str, str] = {}
    notes: Sequence[str] = ()

    def __init__(self, path: "str | PathLike[str]", arguments: Sequence[str] = ()) -> None:
        self.path, self.arguments, self.name = check_file(path), [*map(str, arguments)], str(path)

    def run(self, around: Any = None) -> Any:
        """Run it in this process, to its end or a StepsDone, and return its Ending. Nothing is raised. `around`: a
        context inside of which it runs, and which sees what it raises."""
        def inside():
            with around or nullcontext():
                self._run()

        with _variables(self.environment):
            return ending(inside)

    def _run(self):
        path = os.path.abspath(self.path)  # as `__file__` and tracebacks have it: a script may change its folder
        begin_program(path)
        with _as_main(path, [self.path, *self.arguments]) as module:
            with io.open_code(path) as file:
                code = compile(file.read(), path, "exec")
            exec(code, module.__dict__)


class Module(Script):
    """A module and its arguments, run as `python -m` runs it in `folder`. FileNotFoundError where there is none."""

    def __init__(self, name: str, arguments: Sequence[str] = (), folder: "str | PathLike[str]" = ".") -> None:
        self.name, self.arguments, self._folder = name, [*map(str, arguments)], os.path.abspath(folder)
        with self._searched():
            if name.startswith(".") or importlib.util.find_spec(name.partition(".")[0]) is None:  # imports nothing yet
                raise FileNotFoundError(f"no module {name}: expected one that `python -m` finds from {self._folder}")

    def _run(self):
        with self._searched():
            spec = importlib.util.find_spec(self.name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self.name}.__main__")
            if spec is None or spec.origin is None:
                raise SystemExit(f"{self.name} is no module that `python -m` can run")
            begin_program(spec.origin)
            sys.argv = ["-m", *self.arguments]
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)

    @contextmanager
    def _searched(self):
        argv, search = sys.argv, sys.path[:]
        sys.path[0] = self._folder
        try:
            yield
        finally:
            sys.argv, sys.path[:] = argv, search


class Function:
    """A function without arguments in a file, as "steps.py:step". Errors as those of Script; ValueError without ":"."""

    notes: Sequence[str] = ()

    def __init__(self, name: str, folder: "str | PathLike[str]" = ".") -> None:
        path, colon, function = name.rpartition(":")
        if not colon or not function.isidentifier():
            raise ValueError(f"{name!r}: expected a file and a function in it, as \"steps.py:step\"")
        self.path, self.function, self.name = check_file(Path(folder) / path), function, name

    def run(self) -> Any:
        """Run its file, not as `__main__`, then the function; see Script.run."""
        return ending(self._run)

    def _run(self):
        begin_program(self.path)
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
        return Ending("error", 1, own_traceback(error), _in_a_line(error), error)
    return Ending("end")


def _in_a_line(error):
    """Return an exception's type and the first line of its message that is not empty."""
    kind = type(error)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.").removeprefix("__main__.")
    message = str(traceback.TracebackException.from_exception(error))  # there is one where str(error) fails
    return ": ".join([name, *[line.strip() for line in message.splitlines() if line.strip()][:1]])


def _exited(code):
    """What `sys.exit(code)` means: a number is the status; anything else is written, and the status is 1."""
    if code is None or isinstance(code, int):
        return Ending("exit", int(code or 0) & 0xFF)
    return Ending("exit", 1, f"{code}\n", str(code))


@contextmanager
def _as_main(path, words):
    """Be `__main__`. It stays so after the script, for what runs at exit and for processes that are started then."""
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None, __package__=None)
    argv, search = sys.argv, sys.path[:]
    sys.modules["__main__"] = module
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    try:
        yield module
    finally:
        sys.argv, sys.path[:] = argv, search


@contextmanager
def _variables(environment):
    """Set variables of the environment. OMP_NUM_THREADS has been read by now: threads are set, too."""
    before, threads = {name: os.environ.get(name) for name in environment}, torch.get_num_threads()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", threads)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


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
