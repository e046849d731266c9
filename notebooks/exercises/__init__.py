"""Graders of the exercises at the end of each page. There is one module for each page, with `first`, `second`, `third`.

    from exercises import zero_3 as exercise

    exercise.first(predict)      grade your function: it prints one verdict
    exercise.first.hint()        show a hint; each call shows the next
    exercise.first.solution()    show a solution, folded

What is right is ticked on the start page, where the reader's folder has one.
"""

import contextlib
import functools
import importlib
import io
import re
import runpy
import sys
from pathlib import Path

import torch

from refimpl import comm
from refimpl.ranks import RankError, World, run

from .asking import NOT_THEIRS, NOT_YET, SCALAR, Asked, Complaint, not_filled

__all__ = "SCALAR", "Exercise", "close", "drawn", "exercise", "launch", "off", "readable"

HERE = Path(__file__).resolve().parent
START_PAGE = HERE.parents[1] / "tools" / "start_page.py"
SECONDS = 60  # that an answer may take
FRAMES_NOT_THEIRS = re.compile(rf'^  File "(?:{"|".join(map(re.escape, NOT_THEIRS))}).*\n(?:    .*\n?)*', re.MULTILINE)
OF_VML = ("acos asin atan ceil cos cosh erf erfc erfinv exp expm1 floor lgamma log log10 log1p log2 rsqrt sin sinh "
          "sqrt tan tanh trunc").split()

launch = functools.partial(comm.launch, limit=SECONDS)


class Exercise:
    """What grades one answer. Made by `exercise` from a function that takes the answer and returns None if everything
    is right, else a sentence: what was expected and what was measured."""

    apart = True  # no answer runs in the reader's kernel: what it breaks is not broken there

    def __init__(self, check, on, gives, process):
        self.check, self.on, self.gives, self.process, self.hints_shown = check, on, gives, process, 0
        functools.update_wrapper(self, check)
        self.slug, self.key = check.__module__.rpartition(".")[2], check.__name__  # of the page; of the exercise

    def __call__(self, answer):
        """Print what is wrong with `answer`, or that everything is right."""
        complaint = self.complaint(answer)
        print(f"{self.key} exercise: {complaint or f'right, on {self.on}'}")
        if not complaint:
            tick(self.slug, self.key)

    def complaint(self, answer):
        """Return the sentence that says what is wrong with `answer`; None if everything is right."""
        if not callable(answer):
            return f"expected your function itself, without brackets after its name; you give {_short(answer)}"
        if not_filled(answer):
            return NOT_YET
        asked = Asked(answer, self.gives)
        try:
            if self.apart and self.process == "check":
                return _in_a_process(_graded, self.__module__, self.__name__, asked)
            if self.apart and self.process == "call":
                return self.check(lambda *args: _in_a_process(_called, asked, args))
            return self.check(asked)
        except Complaint as complaint:
            return str(complaint)
        except RankError as error:
            return _of_ranks(error)

    def hint(self):
        """Print the next hint of those in the module's HINTS; after the last, the first again."""
        hints = sys.modules[self.__module__].HINTS[self.key]
        number = self.hints_shown % len(hints)
        print(f"hint {number + 1} of {len(hints)}: {hints[number]}")
        self.hints_shown += 1

    def solution(self):
        """Show a solution, folded where the output is a page."""
        from .solutions import show

        show(self.slug, self.key)


def exercise(on, gives=None, process="check"):
    """Decorate a check. `on`: what it compares, such as "parity and bytes". `gives`: what the answer has to return (see
    `asking.fault`). `process`: what has a process of its own: the whole "check"; each "call" of the answer, where the
    check itself launches ranks; the "ranks" that the check launches, where the answer runs in them."""
    return lambda check: Exercise(check, on, gives, process)


def _graded(rank, module, name, asked):
    return getattr(importlib.import_module(module), name).check(asked)


def _called(rank, asked, args):
    return asked(*args)


def _choose_kernels():
    """Call the functions that torch has from MKL's VML on one number each.

    MKL chooses a kernel when a function is first called in a process. If two threads call it first, each on its part of
    a tensor, one part may come from another kernel, and be off by 1.5e-4: github.com/pytorch/pytorch/issues/188792.
    """
    for dtype in (torch.float32, torch.float64):
        for name in OF_VML:
            getattr(torch, name)(torch.full((1,), 0.5, dtype=dtype))


_choose_kernels()  # of the page's own process; `_quietly` does it in others


def _quietly(rank, function, *args):
    """Return (what a function returned, the sentence of its Complaint or None, what it printed)."""
    _choose_kernels()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            return function(rank, *args), None, printed.getvalue()
        except Complaint as complaint:
            return None, str(complaint), printed.getvalue()


def _in_a_process(function, *args):
    """Call `function(0, *args)` in a process of its own, which ends after `SECONDS` whatever an answer does there."""
    [(found, complaint, printed)] = run(_quietly, World(1), (function, *args), timeout=float("inf"), limit=SECONDS)
    print(printed, end="")
    if complaint is not None:
        raise Complaint(complaint)
    return found


def _of_ranks(error):
    """Return what a RankError has to say, as a sentence; raise it if the answer is not to blame."""
    if isinstance(error.__cause__, Complaint):
        return str(error.__cause__)
    if error.__cause__ is not None and not isinstance(error.__cause__, SystemExit):
        raise error
    first, _, rest = str(error).partition("\n")
    first = f"it {first.removeprefix('rank 0 ')}" if first.startswith("rank 0 ") else first
    return f"your function was ended: {first}" + ("\n" + FRAMES_NOT_THEIRS.sub("", rest)) * bool(rest)


def _short(value):
    text = repr(value)
    return f"{text[:60]}{' …' * (len(text) > 60)} ({type(value).__name__})"


def tick(slug, name):
    """Note on the start page of the reader's folder, if it is one, that an exercise of a page is solved."""
    if Path("INDEX.ipynb").exists() and START_PAGE.exists():
        with contextlib.suppress(OSError):  # a folder that cannot be written to
            runpy.run_path(str(START_PAGE))["tick"](Path(), slug, name)


# --- what checks share -----------------------------------------------------------------------------------------------


def drawn(*shapes, scale=1.0, device="cpu"):
    """Return random tensors of these shapes, the same in each call; the first is multiplied by `scale`."""
    torch.manual_seed(0)
    first, *rest = (torch.randn(shape).to(device) for shape in shapes)
    return first * scale, *rest


def close(said, expected):
    """Tell whether an answer has the expected shape and dtype, and its values but for 1e-4 of the largest finite one
    (in 16 bits: 2⁻⁷). A tensor whose storage was freed is not close to anything, and is not read."""
    if said.shape != expected.shape or said.dtype != expected.dtype or not readable(said):
        return False
    share = 1e-4 if said.dtype.itemsize >= 4 else 2.0**-7
    limit = share * expected[expected.isfinite()].abs().max().item()
    return torch.allclose(said.float(), expected.float(), rtol=share, atol=limit)


def readable(tensor):
    """Tell whether the storage of a tensor still has the bytes that its elements need. To read it without them would
    end the process."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    need = tensor.itemsize * (tensor.storage_offset() + reach) if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() >= need


def off(said, expected, right):
    """Say what is wrong with a tensor, in words that follow its name: it is not what `right` says. Returns nothing if
    it is close to what was expected."""
    if close(said, expected):
        return ""
    if said.shape != expected.shape or said.dtype != expected.dtype:
        return (f" has the shape {tuple(said.shape)} and {said.dtype}, expected {tuple(expected.shape)} and "
                f"{expected.dtype}")
    return f" is not {right}" + " (it has NaN)" * bool(readable(said) and said.isnan().any())
