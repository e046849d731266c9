"""What ranks print, in the caller's stdout and stderr: labelled, and in rank order although they print together."""

import codecs
import sys
from collections import deque

STREAMS = ("stdout", "stderr")


class RankOutput:
    """Collects what ranks write. Lines of the lowest running rank are shown at once, those of others after it."""

    def __init__(self, world_size):
        self._lines = [deque() for _ in range(world_size)]  # complete lines (stream, text) not shown yet
        self._partial = [{stream: [] for stream in STREAMS} for _ in range(world_size)]  # parts of a line
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = [{stream: decoder("replace") for stream in STREAMS} for _ in range(world_size)]
        self._finished = [False] * world_size
        self._turn = 0  # lines of this rank and of lower ones are shown at once

    def feed(self, rank, stream, data):
        """Take the bytes `data` that `rank` wrote to "stdout" or "stderr"."""
        partial = self._partial[rank][stream]
        *ends, beginning = self._decoders[rank][stream].decode(data).split("\n")
        for end in ends:
            self._lines[rank].append((stream, "".join(partial) + end))
            partial.clear()
        partial += [beginning] if beginning else []
        if rank <= self._turn:
            self._show(rank)

    def finish(self, rank):
        """Note that `rank` writes no more. A last line without a newline is complete; the next rank has its turn."""
        for stream, partial in self._partial[rank].items():
            if partial:
                self._lines[rank].append((stream, "".join(partial)))
                partial.clear()
        self._finished[rank] = True
        if rank < self._turn:
            self._show(rank)
        while self._turn < len(self._finished) and self._finished[self._turn]:
            self._show(self._turn)
            self._turn += 1
        if self._turn < len(self._finished):
            self._show(self._turn)

    def _show(self, rank):
        for stream, line in self._lines[rank]:
            # A progress bar rewrites its line. Show the last text, as a terminal would: nothing, if the bar has cleared
            # itself.
            _, rewritten, line = line.rstrip("\r").rpartition("\r")
            if not rewritten or line.strip():
                _print(f"[rank {rank}] {line}", getattr(sys, stream))
        self._lines[rank].clear()


def _print(text, file):
    """Print also what `file` has no letters for, as `\\u2192`."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=file)
