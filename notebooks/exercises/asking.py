"""A reader's function as a grader calls it: what it returns is looked at first, what it breaks is put into words."""

import dis
import inspect
import os
import sys
import traceback
from numbers import Real
from pathlib import Path

import torch

from refimpl import comm, memory
from refimpl.memory.tracking import in_place

SCALAR = "a number, or a tensor of one"
ANYTHING = "anything"  # what a function that was itself returned may return: None, too
CHARACTERS = 20_000  # that a reader's function may print
WATCHED = torch, torch.Tensor, torch.nn.Module, torch.nn.functional, torch.optim, torch.autograd, memory


NOT_YET = "not answered yet (or is a `return` missing? the function gave None)"
EMPTY = {"RESUME", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST", "NOP", "COPY_FREE_VARS", "MAKE_CELL", "CACHE"}
HERE = Path(__file__).parent
NOT_THEIRS = tuple(f"{folder}{os.sep}" for folder in (
    HERE, HERE.parent / "blanks", Path(torch.__file__).parent, Path(in_place.__file__).parent,
    Path(comm.__file__).parent))


class Complaint(Exception):
    """Raised with the sentence that a grader prints about an answer."""


class Asked:
    """Calls a reader's function. Raises Complaint if it returns nothing, or not what it was to return (`gives`: see
    `fault`), takes other arguments, raises, prints without end, ends the process or changes torch."""

    def __init__(self, answer, gives=None):
        self.answer, self.gives = answer, gives

    def __call__(self, *args, **options):
        self._takes(args, options)
        settings, namespaces = _settings(), [dict(vars(each)) for each in WATCHED]
        printed, sys.stdout = sys.stdout, _Limited(sys.stdout)
        try:
            result = self.answer(*args, **options)
        except Complaint:
            raise
        except SystemExit:
            raise Complaint("your function ends Python (exit, or sys.exit): let it return instead") from None
        except Exception as error:
            raise Complaint(_told(error)) from None
        finally:
            sys.stdout = printed
            changed = _put_back(settings, namespaces)
        if changed:
            raise Complaint(f"your function changes {changed} for all that comes after it: leave torch as it is")
        if self.gives != ANYTHING and (result is None or result is ...):
            raise Complaint(NOT_YET)
        if self.gives in (int, float):
            result = getattr(result, "total", result)  # a Ledger will do
        if wrong := fault(result, self.gives):
            raise Complaint(wrong)
        return _guarded(result, self.gives)

    def _takes(self, args, options):
        try:
            inspect.signature(self.answer).bind(*args, **options)
        except ValueError:
            return  # a function of C has no signature
        except TypeError:
            given = ", ".join([type(each).__name__ for each in args] + list(options))
            number, name = len(args) + len(options), getattr(self.answer, "__name__", "a function")
            raise Complaint(f"your function is called with {number} argument{'s' * (number != 1)} ({given}), and does "
                            f"not take them: it is {name}{inspect.signature(self.answer)}") from None


def _guarded(value, gives):
    """Return what an answer returned. The functions among it are called as the answer itself is."""
    if isinstance(gives, tuple):
        return tuple(map(_guarded, value, gives))
    return Asked(value, ANYTHING) if gives is callable else value


def fault(value, gives):
    """Return a sentence if `value` is not what an answer was to give; None if it is.

    `gives`: int or float, a number; SCALAR, a number or a tensor of one; another class; callable, a function; a tuple
    of these, so many values; `[kind]`, a list of any length; None, anything.
    """
    if gives is None or gives == ANYTHING:
        return None
    if isinstance(gives, (tuple, list)):
        kinds = gives if isinstance(gives, tuple) else gives * len(value) if isinstance(value, (tuple, list)) else gives
        if not isinstance(value, (tuple, list)) or len(value) != len(kinds):
            return f"expected {_name(gives)}, you return {_shown(value)}"
        wrong = next(filter(None, map(fault, value, kinds)), None)
        return f"in your list: {wrong}" if wrong and isinstance(gives, list) else wrong
    if gives in (int, float, SCALAR):
        good = isinstance(value, Real) and not isinstance(value, bool)
        good |= gives == SCALAR and isinstance(value, torch.Tensor) and value.numel() == 1
    else:
        good = callable(value) if gives is callable else isinstance(value, gives)
    if good:
        return None
    inside = gives in (int, float) and isinstance(value, torch.Tensor) and value.numel() == 1
    return f"expected {_name(gives)}, you return {_shown(value)}{': `.item()` takes the number out' * inside}"


def not_filled(answer):
    """Tell whether a function does nothing but return None or `...`, or a method of a class."""
    if isinstance(answer, type):
        return any(map(not_filled, filter(inspect.isroutine, map(inspect.unwrap, vars(answer).values()))))
    code = getattr(getattr(answer, "__func__", answer), "__code__", None)
    steps = list(dis.get_instructions(code)) if code is not None else []
    returned = [each.argval for each in steps if each.opname in ("LOAD_CONST", "RETURN_CONST")]
    return bool(steps) and {each.opname for each in steps} <= EMPTY and returned[-1] in (None, ...)


def _name(gives):
    if isinstance(gives, tuple):
        apart = "; " if any(isinstance(each, list) for each in gives) else ", "
        return f"{len(gives)} values ({apart.join(map(_name, gives))})"
    if isinstance(gives, list):
        return f"a list or tuple, each of it {_name(gives[0])}"
    return {int: "a number", float: "a number", bool: "True or False", str: "a text", callable: "a function",
            torch.Tensor: "a tensor", SCALAR: SCALAR}.get(gives, f"a {getattr(gives, '__name__', gives)}")


def _shown(value):
    text = repr(value) if not isinstance(value, torch.Tensor) else f"a tensor of shape {tuple(value.shape)}"
    return f"{text[:60]}{' …' * (len(text) > 60)} ({type(value).__name__})"


def _told(error):
    """Return an exception of the reader's function as a sentence, and below it the lines that led there, without those
    of torch, of the tracker, of communicators and of the graders."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(NOT_THEIRS)]
    lines = "".join(traceback.format_list(frames))
    return f"your function raises {type(error).__name__}: {error}\n{lines}".rstrip()


class _Limited:
    """A stdout that ends an endless print."""

    def __init__(self, file):
        self._file, self._left = file, CHARACTERS

    def write(self, text):
        """Write, up to the limit."""
        self._left -= len(text)
        if self._left < 0:
            raise Complaint(f"your function prints more than {CHARACTERS:,} characters: print less")
        return self._file.write(text)

    def __getattr__(self, name):
        return getattr(self._file, name)


def _settings():
    return {"torch's default dtype": (torch.set_default_dtype, torch.get_default_dtype()),
            "whether torch makes graphs": (torch.set_grad_enabled, torch.is_grad_enabled()),
            "torch's deterministic algorithms": (torch.use_deterministic_algorithms,
                                                 torch.are_deterministic_algorithms_enabled())}


def _put_back(settings, namespaces):
    """Undo what was changed of torch; return the name of one such thing, or None."""
    changed, now = None, _settings()
    for name, (setter, value) in settings.items():
        if now[name][1] != value:
            setter(value)
            changed = name
    for owner, before in zip(WATCHED, namespaces, strict=True):
        after = vars(owner)
        for name, value in before.items():
            if after.get(name) is not value and not name.startswith("__"):
                setattr(owner, name, value)
                changed = f"{owner.__name__}.{name}"
    return changed
