"""What ranks print, in the caller's stdout and stderr: labelled, and in rank order although they print at once."""

import codecs
import sys
from collections import deque

STREAMS = ("stdout", "stderr")


class RankOutput:
    """Collects what each rank writes. The lowest rank that still runs is shown as it writes; the others wait."""

    def __init__(self, world_size):
        self._lines = [deque() for _ in range(world_size)]  # (stream, text): complete, and not shown yet
        self._partial = [dict.fromkeys(STREAMS, "") for _ in range(world_size)]
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decoders = [{stream: decoder("replace") for stream in STREAMS} for _ in range(world_size)]
        self._finished = [False] * world_size
        self._turn = 0  # whose lines are shown at once; those of lower ranks too, should any come late

    def feed(self, rank, stream, data):
        """`rank` wrote the bytes `data` to "stdout" or "stderr"."""
        text = self._partial[rank][stream] + self._decoders[rank][stream].decode(data)
        *complete, self._partial[rank][stream] = text.split("\n")
        self._lines[rank] += [(stream, line) for line in complete]
        if rank <= self._turn:
            self._show(rank)

    def finish(self, rank):
        """`rank` has no more to say: a last line without an end is complete, and the next rank has its turn."""
        for stream, text in self._partial[rank].items():
            if text:
                self._lines[rank].append((stream, text))
                self._partial[rank][stream] = ""
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
            # A progress bar rewrites its line: what stands there last is what a terminal would show.
            print(f"[rank {rank}] {line.rstrip(chr(13)).rpartition(chr(13))[2]}", file=getattr(sys, stream))
        self._lines[rank].clear()
