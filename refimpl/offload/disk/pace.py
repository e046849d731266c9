"""A disk as slow as a given link: each transfer ends when a link of that rate would have ended it."""

import contextlib
import threading

from ...comm.backend.clock import now, sleep_until


class Pace:
    """Makes transfers take turns on a `Link` (refimpl.comm): one begins when it is asked for and the one before has
    ended. Without a link they take what they take."""

    def __init__(self, link=None):
        self.link, self._free, self._lock = link, 0.0, threading.Lock()

    @contextlib.contextmanager
    def __call__(self, nbytes):
        """Let the context end no sooner than the link would have moved `nbytes`."""
        if self.link is None:
            yield
            return
        with self._lock:
            end = self._free = max(now(), self._free) + self.link.seconds("send", nbytes, 2)
        yield
        sleep_until(end)
