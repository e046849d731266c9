"""For how long a rank may do nothing: it waits for a disk, and others wait for it."""

from contextlib import contextmanager

from ...ranks.signs import beat

FILES = 1800.0  # seconds that a save or a load may take
_seconds = 0.0


@contextmanager
def patient(seconds=FILES):
    """Let this rank go without a sign for so long in this context. Where others have started ranks: `launch` itself
    watches those that it has started by its `timeout` alone."""
    global _seconds
    before, _seconds = _seconds, max(seconds, _seconds)
    try:
        yield
    finally:
        beat()  # before the patience ends: who reads its end sees this, too
        _seconds = before


def patience():
    """Return the seconds that `patient` has given this rank."""
    return _seconds
