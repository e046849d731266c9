"""Spans of time: what a rank does and what goes on meanwhile, recorded while it happens.

    with SpanRecorder() as recorder:
        recorder.enter("compute", "forward", "blocks.0")     # from now on, until another `enter` or `leave`
        recorder.leave("compute")
    recorder.recording.seconds("forward")

Work that goes on by itself, such as a collective, reports to the recorder that is active (`started`). It lasts from the
moment that it was started until it is known to have ended: each time that anything starts or ends, the recorder asks
all work in flight. (gloo does not report the end of a message: it is known once a rank has waited for it.
Over a `comm.Link` the moment is known exactly.) The part of it that a rank spent waiting, with nothing else to do, is
`waited`; the part under computation cost no time. Times are the host's: a GPU does its work later.
"""

import contextlib
import math
import time
from typing import NamedTuple

COMPUTE = "compute"  # the lane of what a rank computes
_active = []  # recorders, the innermost one last


class Span(NamedTuple):
    """Something that took from `begin` to `end` (ns since 1970); in its last `waited` ns the rank did nothing else."""

    lane: str
    kind: str
    name: str
    begin: int
    end: int
    nbytes: int = 0
    waited: int = 0

    @property
    def seconds(self):
        """Return the seconds from begin to end."""
        return (self.end - self.begin) / 1e9


class SpanRecording:
    """The spans of one rank, in the order in which they ended. `lanes`: which of them to draw, from the top."""

    def __init__(self, lanes=None):
        self.spans, self.lanes = [], lanes

    def of(self, kind):
        """Return the spans of a kind that have a name."""
        return [span for span in self.spans if span.kind == kind and span.name]

    def seconds(self, kind):
        """Return the seconds of all spans of a kind, added up."""
        return sum(span.seconds for span in self.spans if span.kind == kind)

    def waited(self, kind):
        """Return how many seconds of them the rank spent waiting, with nothing else to do."""
        return sum(span.waited for span in self.spans if span.kind == kind) / 1e9

    def hidden(self, kind):
        """Return how many seconds of them the rank computed: what overlap saves."""
        waits = [(span.end - span.waited, span.end) for span in self.spans if span.waited]
        return sum(_overlap(span, each) - sum(_overlap((max(begin, each.begin), min(end, each.end)), span)
                                              for begin, end in waits)
                   for span in self.spans if span.kind == kind for each in self.spans if each.lane == COMPUTE) / 1e9

    def plot(self, trace=None):
        """Return a Gantt chart, over the bytes of a tracker that ran at the same time."""
        from .gantt import gantt  # which loads matplotlib

        return gantt(sorted(self.spans, key=lambda span: span.begin), trace, self.lanes)


def _overlap(a, b):
    """Return the nanoseconds that two intervals, or Spans, have in common."""
    (a_begin, a_end), (b_begin, b_end) = ((x.begin, x.end) if isinstance(x, Span) else x for x in (a, b))
    return max(0, min(a_end, b_end) - max(a_begin, b_begin))


class SpanRecorder:
    """Records spans in `recording`. As a context it is the active recorder, to which `started` reports.

    `lanes`: {kind: lane} of work that goes on by itself; by default each kind has a lane of its own.
    """

    def __init__(self, lanes=None):
        self.lanes = lanes or {}
        self.recording = SpanRecording([COMPUTE, *dict.fromkeys(self.lanes.values())] if lanes else None)
        self._busy, self._in_flight = {}, []  # lane → (kind, name, begin); RunningSpans

    def __enter__(self):
        _active.append(self)
        return self

    def __exit__(self, *error):
        _active.remove(self)
        for lane in list(self._busy):
            self.leave(lane)

    def enter(self, lane, kind, name=""):
        """Begin a span of `kind` in this lane; the one before it, if any, ends."""
        self._busy[lane] = kind, name, self.leave(lane)

    def leave(self, lane):
        """End the span of this lane, if there is one; return the time."""
        now = self.poll()
        if lane in self._busy:
            self.recording.spans.append(Span(lane, *self._busy.pop(lane), now))
        return now

    def is_busy(self, lane):
        """Tell whether a span of this lane has begun and not ended."""
        return lane in self._busy

    def poll(self):
        """Note which work in flight has ended by now; return the time."""
        now = time.time_ns()
        for running in [running for running in self._in_flight if running.is_done()]:
            # when it ended, if that is known, else when it was seen
            running.end = min(running.ended() or math.inf, now)
            self._in_flight.remove(running)
        return now


@contextlib.contextmanager
def computing(kind, name=""):
    """Record what this rank does in this context as a span of computation in the active recorder, if there is one. In
    another span of computation it is a part of that."""
    # the outer span has this time already
    recorder = _active[-1] if _active and not _active[-1].is_busy(COMPUTE) else None
    if recorder is not None:
        recorder.enter(COMPUTE, kind, name)
    yield
    if recorder is not None:
        recorder.leave(COMPUTE)


def started(kind, *tensors, name=""):
    """Start a span of work on these tensors in the active recorder: a RunningSpan, or None if no recorder is active."""
    return RunningSpan(_active[-1], kind, tensors, name) if _active else None


class RunningSpan:
    """A span of work that goes on by itself; it begins when this is made."""

    def __init__(self, recorder, kind, tensors, name=""):
        self.recorder, self.kind, self.name = recorder, kind, name
        self.nbytes = max(tensor.nbytes for tensor in tensors)
        self.begin, self.end, self.waited = recorder.poll(), None, 0
        self.is_done, self.ended = None, lambda: None  # `launched` sets them

    def launched(self, is_done, ended=lambda: None):
        """Note that the rank has launched it and can do something else. `is_done()` says whether it has ended, and
        `ended()` when (ns since 1970; None if that is not known)."""
        self.waited, self.ended = time.time_ns() - self.begin, ended
        if is_done():
            self.end = self.begin + self.waited
        else:
            self.is_done = is_done
            self.recorder._in_flight.append(self)

    @contextlib.contextmanager
    def waiting(self):
        """Time the wait for its end, in this context, and record the span."""
        recorder, begin = self.recorder, self.recorder.poll()
        yield
        end = self.end or min(self.ended() or math.inf, time.time_ns())
        if self in recorder._in_flight:
            recorder._in_flight.remove(self)
        self.waited += max(0, end - begin)
        recorder.recording.spans.append(Span(recorder.lanes.get(self.kind, self.kind), self.kind, self.name, self.begin,
                                             end, self.nbytes, self.waited))
