"""The caller's side when it is the caller that fails: the error is its own, and no process and no file is left."""

import contextlib
import os
import resource
import signal
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
from rank_pool import failure

from refimpl.comm import launch
from refimpl.ranks import launched_ranks


def test_too_many_open_files_say_so_and_leave_nothing(processes_left):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    for more in (0, 3, 6, 9, 12, 15):  # runs out in one place after the other
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                launch(lambda comm: comm.rank, 8)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert processes_left() == []
    assert launch(lambda comm: comm.rank, 2) == [0, 1]


def test_an_interrupt_at_any_moment_stays_an_interrupt(processes_left, monkeypatch):
    """While ranks are started, when some have no pipe yet; later moments have their own tests."""
    start = launched_ranks.LaunchedRanks._start
    for moment in range(3):
        def interrupted(self, rank, ends, moment=moment):
            if rank.number == moment:
                raise KeyboardInterrupt
            start(self, rank, ends)

        monkeypatch.setattr(launched_ranks.LaunchedRanks, "_start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            launch(lambda comm: comm.barrier(), 3)
        assert processes_left() == []


def test_a_second_interrupt_does_not_leave_ranks_behind(processes_left, monkeypatch):
    monkeypatch.setattr(launched_ranks.LaunchedRanks, "_end", mock.Mock(side_effect=KeyboardInterrupt))
    timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        launch(lambda comm: time.sleep(1000), 3)
    timer.join()
    assert processes_left() == []


def test_a_caller_who_cannot_print_gets_that_error_and_no_process_is_left(processes_left):
    def fn(comm):
        print("something")
        time.sleep(1000)

    closed = mock.Mock(encoding="utf-8", write=mock.Mock(side_effect=BrokenPipeError("nobody reads")))
    with contextlib.redirect_stdout(closed), pytest.raises(BrokenPipeError, match="nobody reads"):
        launch(fn, 3)
    assert processes_left() == []


def test_records_of_ranks_that_say_nothing_tell_who_returned_too_early():
    failure(r"^rank 0 returned after 0 collectives; rank 1 waits for it in barrier \(#1\)",
            lambda comm: comm.barrier() if comm.rank else None, 2, timeout=4)


def test_a_result_that_can_be_read_nowhere_is_named():
    class TwoArguments(Exception):
        def __init__(self, first, second):
            super().__init__(first)

    error = failure("rank 1 returned a value that cannot be unpickled: TypeError.*'second'",
                    lambda comm: TwoArguments(1, 2) if comm.rank else None, 2)
    assert error.ranks == (1,) and isinstance(error.__cause__, TypeError)


def test_ranks_of_which_none_has_ended_are_looked_at_unless_they_may_wait_for_ever():
    soon = time.monotonic() + 100
    ranks = SimpleNamespace(_ranks=[SimpleNamespace(value=None)], _signs=SimpleNamespace(next=soon))
    assert launched_ranks.LaunchedRanks._look(ranks, 5.0) == soon
    assert launched_ranks.LaunchedRanks._look(ranks, float("inf")) == float("inf")
