"""The exercises at the end of each page: each is graded on parity (the same result) and on bytes (the tracker's word).

One module a page, `first`, `second`, `third` in it; each takes the reader's function, prints one verdict and returns
nothing.
"""


class _Blank(Exception):
    """The reader's function still returns None or Ellipsis."""


def verdict(name, answer, check):
    """Print what `check(answer)` found wrong, or that nothing was.

    `check` returns None if all is right, else a sentence that says what was expected and what was read. A function that
    returns None or Ellipsis is not answered yet; what it raises is shown, not hidden.
    """

    def asked(*args):
        result = answer(*args)
        if result is None or result is ...:
            raise _Blank
        return result

    try:
        complaint = check(asked)
    except Exception as error:
        if not isinstance(error, _Blank) and not isinstance(error.__cause__, _Blank):  # the cause: asked in a rank
            raise
        complaint = "not answered yet (or is a `return` missing? the function gave None)"
    print(f"{name} exercise: {complaint or 'right, on parity and on bytes'}")
