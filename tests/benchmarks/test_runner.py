"""Timing in alternation, on functions whose time is known."""

import time

import pytest
import torch
from patience import patiently, within

from benchmarks.runner import Comparison, KernelTimer, compare


@pytest.mark.alone
def test_the_ratio_of_two_sleeps_is_theirs():
    timing = compare({"slow": lambda: time.sleep(0.08), "fast": lambda: time.sleep(0.02)}, rounds=5, warmup=0)
    assert timing.median("fast") == pytest.approx(0.02, rel=0.3)
    assert timing.ratio("slow", "fast") == pytest.approx(4, rel=0.3)
    assert timing.ratio("fast", "slow") == pytest.approx(1 / timing.ratio("slow", "fast"))
    assert "slow  0.08" in repr(timing)


@patiently
def test_candidates_alternate_and_warm_up_is_not_counted():
    calls = []

    def candidate(name):
        def call():
            calls.append(name)
            time.sleep(0.1 if calls.count(name) <= 2 else 0)

        return call

    timing = compare({"a": candidate("a"), "b": candidate("b")}, rounds=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert [len(seconds) for seconds in timing.seconds.values()] == [3, 3]
    within(max(timing.seconds["a"]), 0.1)


def test_another_clock(monkeypatch):
    ticks = iter(range(100))
    timing = compare({"a": lambda: None}, rounds=2, timer=lambda function: next(ticks))
    assert timing.seconds == {"a": [2, 3]}


def test_a_kernel_timer_reads_the_device_between_a_large_write_and_the_last_thing_queued(monkeypatch):
    done = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            done.append("event")

        def elapsed_time(self, other):
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4096, 8192))
    timer = KernelTimer("cpu")
    assert timer.buffer.nbytes == 1024
    timer.buffer = type("Buffer", (), {"zero_": lambda self: done.append("write")})()
    assert timer(lambda: done.append("call")) == 0.0025
    assert done == ["wait", "write", "event", "call", "event", "wait"]


def test_median_and_spread_are_those_of_the_rounds():
    timing = Comparison({"a": [1.0, 2.0, 3.0, 4.0, 100.0], "b": [2.0] * 5})
    assert (timing.median("a"), timing.spread("a"), timing.ratio("a", "b")) == (3.0, 2.0, 1.5)
    assert timing.spread("b") == 0


def test_a_bar_is_shown_when_it_takes_over_two_seconds(capsys, monkeypatch):
    compare({"a": lambda: None}, rounds=2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("benchmarks.runner.BAR_DELAY", 0)
    compare({"a": lambda: time.sleep(0.06)}, rounds=4, title="napping")
    assert "napping" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (({},), "candidates={}: expected at least one"), (({"a": print}, 1), "rounds=1"),
    (({"a": print}, 5, -1), "warmup=-1")])
def test_what_cannot_be_compared_is_refused(arguments, message):
    candidates, *numbers = arguments
    with pytest.raises(ValueError, match=message):
        compare(candidates, **dict(zip(("rounds", "warmup"), numbers, strict=False)))


def test_an_error_in_a_candidate_is_not_dropped():
    with pytest.raises(ZeroDivisionError):
        compare({"a": lambda: 1 / 0})
