"""The time of day of all ranks of a machine, and a sleep that is not taken for a hang."""

import time

from ...ranks.signs import beat

SLICE = 0.05  # seconds of sleep between two signs to the caller that this rank goes on

now = time.monotonic  # Linux has one such clock for all processes


def sleep_until(moment):
    """Sleep until `moment` (of `now`), without using a core. No other rank and no thread of gloo's waits for it."""
    while (left := moment - now()) > 0:
        time.sleep(min(left, SLICE))
        beat()


def since_1970(moment):
    """Return a moment of `now` as ns since 1970, the clock of spans."""
    return time.time_ns() - round((now() - moment) * 1e9)
