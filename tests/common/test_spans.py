"""Spans are recorded while they happen: what a lane is busy with, and work that goes on by itself."""

import pickle
import weakref

import pytest
import torch

from refimpl.common import spans
from refimpl.common.spans import Span, SpanRecorder, SpanRecording, started

X = torch.zeros(4)


@pytest.fixture
def clock(monkeypatch):
    """Tell the time: `clock(7)` makes it 7 ns since 1970."""
    now = [0]
    monkeypatch.setattr(spans.time, "time_ns", lambda: now[0])
    return lambda time: now.__setitem__(0, time)


def test_each_span_of_a_lane_ends_the_one_before(clock):
    with SpanRecorder() as recorder:
        for time, kind in ((1, "forward"), (3, "backward")):
            clock(time)
            recorder.enter("compute", kind, "a")
        recorder.enter("disk", "write")
        assert recorder.is_busy("compute") and not recorder.is_busy("gather")
        clock(7)
        recorder.leave("gather")  # which nothing is in
        recorder.leave("compute")
        clock(9)
    assert recorder.recording.spans == [Span("compute", "forward", "a", 1, 3), Span("compute", "backward", "a", 3, 7),
                                        Span("disk", "write", "", 3, 9)]


def test_work_in_flight_ends_when_it_is_first_seen_to_have_ended_and_waiting_counts_while_it_has_not(clock):
    done = {"early": False, "late": False}
    with SpanRecorder({"all_gather": "gather"}) as recorder:
        early, late = (started(kind, X, X[:2], name="2") for kind in ("all_gather", "send"))
        clock(2)  # so long it took to launch them
        early.launched(lambda: done["early"]), late.launched(lambda: done["late"])
        clock(5)
        done["early"] = True
        recorder.poll()
        clock(8)
        with early.waiting(), late.waiting():
            clock(12)
    assert sorted(recorder.recording.spans) == [Span("gather", "all_gather", "2", 0, 5, 16, 2),
                                                Span("send", "send", "2", 0, 12, 16, 6)]


def test_work_that_was_waited_for_is_not_kept():
    """Of a message gloo never tells that it has ended: nothing else would let it go."""
    class Message:
        def has_ended(self):
            return False

    with SpanRecorder() as recorder:
        span, message = started("recv", X), Message()
        span.launched(message.has_ended)
        gone = weakref.ref(message)
        with span.waiting():
            pass
        del span, message
        assert gone() is None and len(recorder.recording.spans) == 1


def test_work_that_has_ended_when_it_is_launched(clock):
    with SpanRecorder() as recorder:
        span = started("all_reduce", X)
        clock(3)
        span.launched(lambda: True)
        clock(9)
        with span.waiting():
            clock(10)
    assert recorder.recording.spans == [Span("all_reduce", "all_reduce", "", 0, 3, 16, 3)]


def test_the_innermost_recorder_is_active_and_none_outside():
    assert started("send", X) is None
    with SpanRecorder() as outer:
        with SpanRecorder() as inner:
            assert started("send", X).recorder is inner
        assert started("send", X).recorder is outer
    with pytest.raises(ArithmeticError), outer:
        raise ArithmeticError
    assert started("send", X) is None


def test_a_recording_can_be_sent_from_a_rank():
    with SpanRecorder({"all_gather": "gather"}) as recorder:
        recorder.enter("compute", "forward", "a")
    again = pickle.loads(pickle.dumps(recorder.recording))
    assert again.spans == recorder.recording.spans and again.lanes == ["compute", "gather"]
    assert again.plot().labels == ["compute", "gather"]


def test_what_is_hidden_is_neither_waiting_nor_idle():
    line = SpanRecording()
    line.spans = [Span("compute", "forward", "a", 0, 10), Span("compute", "backward", "a", 20, 40),
                  Span("gather", "all_gather", "a", 5, 30, 8, waited=4), Span("reduce", "all_reduce", "", 39, 45)]
    assert line.hidden("all_gather") * 1e9 == pytest.approx(5 + 10 - 4)
    assert line.hidden("all_reduce") * 1e9 == pytest.approx(1) and line.seconds("all_gather") * 1e9 == 25
    assert line.waited("all_gather") * 1e9 == pytest.approx(4) and line.of("all_reduce") == []


def test_work_that_knows_when_it_ended(clock):
    with SpanRecorder() as recorder:
        early, late = started("send", X, name="early"), started("send", X, name="late")
        clock(2)
        early.launched(lambda: False, lambda: 4), late.launched(lambda: False, lambda: 9)
        clock(7)
        with early.waiting():
            clock(8)
        with late.waiting():
            clock(10)
    assert recorder.recording.spans == [Span("send", "send", "early", 0, 4, 16, 2),
                                        Span("send", "send", "late", 0, 9, 16, 3)]


def test_computing_in_computing_is_a_part_of_it(clock):
    with spans.computing("forward", "nobody records it"):
        pass
    with SpanRecorder() as recorder:
        with spans.computing("forward", "a"), spans.computing("forward", "in a"):
            clock(3)
        with spans.computing("backward", "a"):
            clock(4)
    assert recorder.recording.spans == [Span("compute", "forward", "a", 0, 3), Span("compute", "backward", "a", 3, 4)]
