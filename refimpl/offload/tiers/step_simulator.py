"""The same plan on a clock that only counts: what a step would stall, before there is anything to run.

A link moves one bucket at a time, in the order in which moves were started: one begins when the link is free and those
that it comes after have ended, and takes latency + bytes / rate. Computation takes what the trace says.
"""

from .placement import TierPlacement


class Clock:
    """Is a mover that moves nothing: `links`: {"out", "in", "disk"} → a `refimpl.comm.Link`, or None for no time."""

    def __init__(self, links, block_bytes=None):
        self.time, self.links, self._block = 0.0, links, block_bytes
        self._free = dict.fromkeys(links, 0.0)

    def now(self):
        """Return the seconds since the beginning."""
        return self.time

    def compute(self, seconds):
        """Let time pass."""
        self.time += seconds

    def seconds(self, link, nbytes):
        """Return how long a link takes."""
        found = self.links.get(link)
        blocks = -(-nbytes // self._block) if self._block and link == "disk" else 1
        return found.latency * blocks + nbytes / found.bytes_per_second if found else 0.0

    def backlog(self, link):
        """Return for how long a link has something to do."""
        return max(0.0, self._free.get(link, 0.0) - self.time)

    def start(self, move):
        """Set when a move ends."""
        begin = max([self.time, self._free.get(move.link, 0.0), *(each.end for each in move.after)])
        move.end = self._free[move.link] = begin + self.seconds(move.link, move.nbytes)

    def wait(self, move):
        """Let time pass until a move ends."""
        self.time = max(self.time, move.end)

    def reserve(self, bucket):
        """No-op: nothing is written."""

    def free(self, bucket, tier):
        """No-op: nothing is there."""


def simulate(trace, links, device, host, disk=True, rule="belady", steps=4, first=None, block_bytes=None):
    """Replay a step's trace `steps` times; return the Counts of all from step `first` on (None: of the last), and their
    seconds as `.seconds`.

    `trace`: [(what, key, bytes, seconds of computation before it)], what as in `common.eviction`, and "hint".
    """
    clock = Clock(links, block_bytes)
    plan = TierPlacement(clock, device, host, disk, rule)
    for step in range(steps):
        if step == (steps - 1 if first is None else first):
            plan.counts, begun = type(plan.counts)(), clock.time
        for what, key, nbytes, seconds in trace:
            clock.compute(seconds)
            if what == "need":
                plan.need(key)
            elif what == "hint":
                plan.hint(key)
            elif what == "drop":
                plan.drop(key)
            else:
                plan.end_use(key, nbytes, what == "changed")
    plan.counts.seconds = clock.time - begun
    return plan.counts
