"""Times on a machine that others use, too."""

import contextlib
import functools
import time

import pytest


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


def against_the_clock(test):
    """Mark a test that is held against the clock: it runs alone, and once more where it was Late."""
    return pytest.mark.alone(patiently(test))


def within(seconds, most):
    """Late if something took as long as that."""
    if seconds >= most:
        raise Late(f"{seconds:.1f} s, expected less than {most} s")


@contextlib.contextmanager
def in_time(most):
    """Late if what is done here takes as long as that."""
    start = time.monotonic()
    yield
    within(time.monotonic() - start, most)


def yardstick():
    """Processor seconds of a fixed piece of Python whose objects do not fit a cache, as those of plans and dry runs."""
    began, size, table = time.process_time(), 150_001, {}
    for i in range(size):
        table[i * 7919 % size] = str(i)
    for i in range(size):
        table[i * 104_729 % size].isdigit()
    return time.process_time() - began


REFERENCE = 0.05  # seconds of `yardstick` where bounds were set: there a plan of 7,000 tensors took 0.73 s


def slowness():
    """How many times longer than there the yardstick takes now, at least 1: on a core that is slower, or whose caches
    and units a neighbour uses."""
    return max(1.0, min(yardstick() for _ in range(3)) / REFERENCE)


def processor_seconds(seconds):
    """What `seconds` of this processor, read just now, would be there."""
    return seconds / slowness()


def about(readings, expected, off):
    """Late if no reading is as near as that."""
    if min(abs(reading - expected) for reading in readings) > off:
        raise Late(readings, expected)


def check(readings, expected):
    """No reading is below the expected seconds (but for the clocks), and the least is at most 5 % above, else Late.

    What comes above is the processor's work beside the waiting: a slower one is given as much more."""
    assert min(readings) >= 0.997 * expected, (readings, expected)
    if min(readings) > 1.05 * expected and min(readings) > (1 + 0.05 * slowness()) * expected:
        raise Late(readings, expected, slowness())


def check_all(pairs):
    for readings, expected in pairs:
        check(readings, expected)
