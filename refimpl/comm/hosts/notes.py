"""What each rank leaves in torch's store, twice a second: that it lives, what it does, and how it failed.

The store outlives a rank, so what it has left there is read when it is gone. A note has no time of day and no time of a
clock in it, since clocks of hosts differ: it has a count, and readers note when that last changed.
"""

import contextlib
import json
import os
import sys
import threading
import time
import traceback
import zlib
from dataclasses import asdict, dataclass, field

import psutil
import torch

from ...ranks.signs import IDLE_SHARE, RECORD, TICKS
from ..hang_diagnosis import waits_in
from .patience import patience

FRAMES = 4  # of the main thread's stack, where it is quiet
LOOK_AT_CHILDREN = 5.0  # seconds
WAITING = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(torch.distributed.__file__))  # code


@dataclass
class ReportedFailure:
    """Says how ranks failed: a text for all, and the `ranks` to blame. `kind`: of which class the error is.

    `first`: whether the rank that wrote it knew of no other's failure. A `consequence` is not to blame: a connection
    that another rank's end has broken."""

    text: str
    ranks: list
    kind: str = "RankError"
    trace: str = ""
    first: bool = True
    consequence: bool = False


@dataclass
class Note:
    """Holds what one rank says.

    - `quiet`: seconds for which it has neither computed nor ended a collective; `at`: where it then is.
    - `doing`: the collective that it waits in, else ""; `since`: for how many seconds it has been in it, or in none.
    - `patience`: seconds that it may be quiet, for a file. `knows`: whether it has read of a failure.
    - `digest`: of its record."""

    count: int = 0
    quiet: float = 0.0
    doing: str = ""
    since: float = 0.0
    at: str = ""
    returned: bool = False
    patience: float = 0.0
    knows: bool = False
    digest: int = 0
    failure: ReportedFailure | None = None

    def pack(self):
        """Return the note as text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text):
        """Return a note from its text."""
        given = json.loads(text)
        return cls(**{**given, "failure": given["failure"] and ReportedFailure(**given["failure"])})


class OwnNote:
    """Keeps the note of this rank. `record`: the memory in which its communicators keep their orders."""

    def __init__(self, record, world_size):
        self.note, self.record, self._world_size = Note(), record, world_size
        self._process, self._main = psutil.Process(), threading.main_thread().ident
        self.writer = None  # the thread whose own work does not count
        self._quiet_since = self._doing_since = self._used_since = time.monotonic()
        self._used = self._children_at = self._children = 0.0

    def refresh(self):
        """Bring the note up to date; return whether the record has changed."""
        given = patience()  # first: the record tells that it has ended
        now, note, content = time.monotonic(), self.note, bytes(self.record)
        digest = zlib.crc32(content)
        used = self._cpu_seconds(now)
        if digest != note.digest or used - self._used > IDLE_SHARE * (now - self._used_since) + TICKS:
            self._quiet_since, self._used, self._used_since = now, used, now
        doing = waits_in(content, self._world_size)
        if doing != note.doing:
            self._doing_since = now
        changed, note.digest = digest != note.digest, digest
        note.count, note.patience, note.quiet = note.count + 1, given, now - self._quiet_since
        note.doing, note.since = doing, now - self._doing_since
        note.at = self._stack() if note.quiet > 2 else ""
        return changed

    def _cpu_seconds(self, now):
        """Return what this process and its children have used, but for the thread that writes notes."""
        times = self._process.cpu_times()
        if now - self._quiet_since > LOOK_AT_CHILDREN and now - self._children_at > LOOK_AT_CHILDREN:
            self._children_at, self._children = now, 0.0
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has just ended
                    self._children += sum(child.cpu_times()[:2])
        mine = time.clock_gettime(time.pthread_getcpuclockid(self.writer)) if self.writer else 0.0
        return sum(times[:4]) + self._children - mine

    def _stack(self):
        """Return where the main thread is, but for the frames of what waits there."""
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        while frames and frames[-1].filename.startswith(WAITING):
            frames.pop()
        return "".join(traceback.format_list(frames[-FRAMES:]))


def read_record(packed):
    """Return a rank's record from what `zlib.compress` made of it; b"" is one of a rank that has not told any."""
    return zlib.decompress(packed) if packed else bytes(RECORD)


@dataclass
class PeerNotes:
    """Holds the notes of all ranks, and since when each has not changed."""

    notes: list = field(default_factory=list)
    heard: list = field(default_factory=list)  # time.monotonic() of the last change, here

    def update(self, notes):
        """Replace the notes by those that were read just now, and see which have changed."""
        now, before = time.monotonic(), [each.count for each in self.notes] or [None] * len(notes)
        self.heard = [self.heard[rank] if note.count == before[rank] else now for rank, note in enumerate(notes)]
        self.notes = notes

    def silent(self, rank):
        """Return for how many seconds a rank has written nothing."""
        return time.monotonic() - self.heard[rank]
