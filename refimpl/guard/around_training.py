"""The guard of a trainer's callback, which is told where training begins and ends, and not always that it failed."""

import atexit
import sys

from .guard import Guard


class UnknownError(Exception):
    """What ended a training of which nobody told the end."""


class AroundTraining:
    """Opens and closes the `guard` of one training after another. One that is open yet, since its training raised and
    nobody told, is closed by the next `begin`, or as the process ends."""

    def __init__(self, folder, limit):
        self._folder, self._limit, self.guard = folder, limit, None

    def begin(self):
        """Open a guard."""
        self.end(UnknownError())
        self.guard = Guard(self._folder, self._limit).__enter__()
        atexit.register(self._at_exit)

    def end(self, error=None):
        """Close the guard, if one is open; `error` is what ended the training, if anything did."""
        guard, self.guard = self.guard, None
        if guard:
            atexit.unregister(self._at_exit)
            guard.__exit__(error and type(error), error, error and error.__traceback__)

    def _at_exit(self):
        self.end(getattr(sys, "last_value", UnknownError()))  # of the traceback that Python has printed
