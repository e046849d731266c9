"""Graders of the exercises at the end of each page. Each grades parity (the same result) and bytes (by the tracker).

There is one module for each page, with the functions `first`, `second` and `third`. Each takes the reader's function,
prints one verdict and returns None. What is right is ticked on the start page, where the reader's folder has one.
"""

import contextlib
import runpy
from pathlib import Path

import torch

START_PAGE = Path(__file__).resolve().parents[2] / "tools" / "start_page.py"


class _Blank(Exception):
    """Raised when the reader's function still returns None or Ellipsis."""


def verdict(name, answer, check):
    """Print what `check(answer)` found wrong, or that everything is right.

    `check` returns None if everything is right, else a sentence that says what was expected and what was measured. An
    answer that returns None or Ellipsis counts as not given yet. An exception that it raises is passed on.
    """

    def asked(*args):
        result = answer(*args)
        if result is None or result is ...:
            raise _Blank
        return result

    try:
        complaint = check(asked)
    except Exception as error:
        if not isinstance(error, _Blank) and not isinstance(error.__cause__, _Blank):  # the cause: raised in a rank
            raise
        complaint = "not answered yet (or is a `return` missing? the function gave None)"
    print(f"{name} exercise: {complaint or 'right, on parity and on bytes'}")
    if not complaint:
        _tick(check.__module__.rpartition(".")[2], name)


def _tick(slug, name):
    """Note on the start page of the reader's folder, if it is one, that an exercise of a page is solved."""
    if Path("INDEX.ipynb").exists() and START_PAGE.exists():
        with contextlib.suppress(OSError):  # a folder that cannot be written to
            runpy.run_path(str(START_PAGE))["tick"](Path(), slug, name)


def drawn(*shapes, scale=1.0, device="cpu"):
    """Return random tensors of these shapes, the same in each call; the first is multiplied by `scale`."""
    torch.manual_seed(0)
    first, *rest = (torch.randn(shape).to(device) for shape in shapes)
    return first * scale, *rest


def close(said, expected):
    """Tell whether an answer has the expected shape, and its values but for 1e-4 of the largest finite one."""
    if said.shape != expected.shape:
        return False
    limit = 1e-4 * expected[expected.isfinite()].abs().max().item()
    return torch.allclose(said.float(), expected, rtol=1e-4, atol=limit)
