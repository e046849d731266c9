"""Times on a machine that others use, too."""

import functools


class Late(AssertionError):
    """Something took longer than it should. On a busy machine that may be nobody's fault."""


def patiently(test, tries=4):
    """The test, once more where it was Late; whatever else is wrong fails at once."""
    @functools.wraps(test)
    def repeated(*args, **kwargs):
        for _ in range(tries - 1):
            try:
                return test(*args, **kwargs)
            except Late:
                pass
        return test(*args, **kwargs)

    return repeated


def within(seconds, most):
    """Late if something took as long as that."""
    if seconds >= most:
        raise Late(f"{seconds:.1f} s, expected less than {most} s")


def check(readings, expected):
    """No reading is below the expected seconds (but for the clocks), and the least is at most 5 % above, else Late."""
    assert min(readings) >= 0.997 * expected, (readings, expected)
    if min(readings) > 1.05 * expected:
        raise Late(readings, expected)
