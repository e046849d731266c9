"""Threads that run one at a time: one that waits for others gives its turn to the next that can go on."""

import contextlib
import random
import threading

import torch

from ..ranks.errors import RankError, names
from .errors import CollectiveMismatch


class Stopped(BaseException):
    """Ends a thread whose run has failed elsewhere. Code that catches Exception lets it pass."""


class Turns:
    """Lets one of `size` threads run at a time, in an order that depends on nothing but what they do.

    Each has its own state of torch's and Python's random numbers; at the beginning all have the caller's. `failure`:
    (rank, exception) of the first that failed, after which all others end.
    """

    def __init__(self, size):
        self._wake = [threading.Event() for _ in range(size)]
        self._waits = {rank: (lambda: True, "its turn") for rank in range(size)}  # (ready, text), of all but who runs
        self._random = dict.fromkeys(range(size), _random_state())
        self._returned, self.failure = [], None

    def run(self, fn):
        """Return [fn(rank) for each rank], each called in a thread of its own. RankError names the rank whose call
        raised; CollectiveMismatch comes as it is."""
        results, before = {}, _random_state()

        def work(rank):
            try:
                with contextlib.suppress(Stopped):
                    self._sleep(rank)
                    results[rank] = fn(rank)
                    self._returned.append(rank)
            except BaseException as error:  # all are the caller's to see
                self.failure = self.failure or (rank, error)
            finally:
                self._pass_on(rank)

        threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True)
                   for rank in range(len(self._wake))]
        for thread in threads:
            thread.start()
        try:
            self._wake[0].set()
            for thread in threads:
                thread.join()
        except BaseException as error:  # the user's interrupt
            self.failure = self.failure or (None, error)
            raise
        finally:
            _set_random_state(before)
            self._random.clear()  # communicators refer to each other, and are there until they are collected
        if self.failure:
            raise _error(*self.failure)
        return [results[rank] for rank in range(len(threads))]

    def wait(self, rank, ready, what):
        """Return when `ready()`. Others run meanwhile. `what`: the text of it. CollectiveMismatch if nobody can run."""
        if not ready():
            self._waits[rank] = ready, what
            self._pass_on(rank)
            self._sleep(rank)

    def _sleep(self, rank):
        self._wake[rank].wait()
        self._wake[rank].clear()
        self._waits.pop(rank, None)
        _set_random_state(self._random[rank])
        if self.failure:
            raise Stopped

    def _pass_on(self, rank):
        """Wake the next that can run. If none can, but some wait, all fail."""
        self._random[rank] = _random_state()
        after = sorted(self._waits, key=lambda other: (other <= rank, other))
        able = [other for other in after if self.failure or self._waits[other][0]()]
        if not able and after:
            self.failure = None, _nobody_can_run(self._waits, self._returned)
            able = after
        if able:
            self._wake[able[0]].set()


def _nobody_can_run(waits, returned):
    said = [f"  rank {rank}: {what}" for rank, (_, what) in sorted(waits.items())]
    ranks = sorted(returned or waits)
    ended = f"{names(ranks)} returned, and others wait" if returned else "all ranks wait"
    return CollectiveMismatch(f"{ended} for what no rank will begin:\n" + "\n".join(said), ranks)


def _error(rank, error):
    """Return the exception for the caller."""
    if rank is None or not isinstance(error, Exception) or isinstance(error, CollectiveMismatch):
        return error
    told = RankError(f"rank {rank} raised {type(error).__name__}: {error}", [rank])
    told.__cause__ = error
    return told


def _random_state():
    return torch.get_rng_state(), random.getstate()


def _set_random_state(state):
    torch.set_rng_state(state[0])
    random.setstate(state[1])
