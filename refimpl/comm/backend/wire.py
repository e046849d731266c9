"""When transfers over a `Link` end, and what waits for that.

Ranks tell each other when they began a collective, by messages beside it. From these times, and from the end of the
collective before, each rank works out the same end, when it waits for it. Until then nobody sleeps.
"""

import os
import threading
from collections import defaultdict, deque

import torch

from . import pairwise
from .clock import now, since_1970, sleep_until
from .torch_internals import unrecorded, unseen

BEGAN, PASSED = 3, 4  # tags: of when ranks began a collective, of when a message has passed the link


class Wire:
    """Serves the transfers of one communicator on this rank. ValueError where ranks do not share a clock."""

    def __init__(self, link, group, world_size):
        if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
            raise ValueError("a link is for ranks of one machine, which share a clock: torchrun has some on another")
        self.link, self._group, self._world_size = link, group, world_size
        self._collectives, self._sources = TransferQueue(), defaultdict(TransferQueue)
        self._free = self._left = 0.0  # when the last collective ends, and when this rank's last message has passed

    def collective(self, name, sent_bytes):
        """Begin a collective in which this rank sends so many bytes; return its LinkTransfer."""
        with unseen():
            mine = torch.tensor([now(), self.link.seconds(name, sent_bytes, self._world_size)], dtype=torch.float64,
                                device="cpu")
            everyones = torch.empty(self._world_size, 2, dtype=torch.float64, device="cpu")
        message = unrecorded(pairwise.all_gather, everyones, mine, self._group, True, BEGAN)
        def read_end():
            began, seconds = zip(*everyones.tolist(), strict=True)
            return self._end_after_the_last(began, seconds)

        return LinkTransfer(self._collectives, message, read_end)

    def _end_after_the_last(self, began, seconds):
        """Return when a collective ends that follows on the last one; from each rank's time and seconds."""
        self._free = max(self._free, *began) + max(seconds)
        return self._free

    def send(self, nbytes, dst):
        """Send a message of so many bytes; return its LinkTransfer."""
        self._left = passed = max(self._left, now()) + self.link.seconds("send", nbytes, self._world_size)
        with unseen():
            message = self._group.send([torch.tensor([passed], dtype=torch.float64, device="cpu")], dst, PASSED)
        return LinkTransfer(TransferQueue(), message, lambda: passed)

    def receive(self, src):
        """Receive a message; return its LinkTransfer."""
        with unseen():
            passed = torch.empty(1, dtype=torch.float64, device="cpu")
            return LinkTransfer(self._sources[src], self._group.recv([passed], src, PASSED), passed.item)


class TransferQueue:
    """Holds transfers whose ends are worked out one after the other."""

    def __init__(self):
        self.begun, self.lock = deque(), threading.Lock()


class LinkTransfer:
    """Holds a transfer over the link, as a work to wait for. `end`: when it has passed, None until someone has waited.

    `message`: what the other side says about it. Once that has come, `read_end()` returns when it has passed.
    """

    def __init__(self, queue, message, read_end):
        self.end, self._queue, self._message, self._read_end = None, queue, message, read_end
        queue.begun.append(self)

    def wait(self):
        with self._queue.lock:
            while self.end is None:
                self._queue.begun[0]._settle()
                self._queue.begun.popleft()
        sleep_until(self.end)

    def is_completed(self):
        return self.end is not None and now() >= self.end

    def passed(self):
        """Return when it has passed the link, in ns since 1970, once someone has waited for it."""
        return since_1970(self.end)

    def _settle(self):
        self._message.wait()
        self.end = self._read_end()
        self._message = self._read_end = None
