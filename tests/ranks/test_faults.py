"""Ranks that raise, exit, are killed, hang or return an unpicklable value: the right one is named, and all are gone."""

import concurrent.futures
import ctypes
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from patience import in_time, patiently, within
from rank_pool import failure, on_ranks

from refimpl.comm import RankError, launch


def strike(fault):
    """The end of this rank, one way or another."""
    if fault == "raise":
        raise ValueError("injected")
    if fault == "exit":
        os._exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)


def strike_in_the_next_all_reduce(fault):
    """As `strike`, when the collective has begun and cannot end, because another rank is late."""
    if fault == "raise":
        begin = dist.all_reduce

        def begin_and_raise(x, op, group, async_op):
            begin(x, op, group, async_op=True)
            strike(fault)

        dist.all_reduce = begin_and_raise
    elif fault == "hang":
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    else:
        threading.Timer(0.05, strike, (fault,)).start()


def faulty(comm, fault, when, culprit):
    x = torch.ones(100)
    comm.all_reduce(x)
    if comm.rank == culprit and when == "before":
        strike(fault)
    if comm.rank == culprit and when == "in":
        strike_in_the_next_all_reduce(fault)
    if comm.rank == (culprit + 1) % comm.world_size and when == "in":
        time.sleep(0.2)
    comm.all_reduce(x)
    if comm.rank == culprit and when == "after":
        strike(fault)
    comm.all_gather(x)
    comm.barrier()


TOLD = {"raise": "raised ValueError: injected", "exit": "exited with code 3", "kill": "was killed by SIGKILL",
        "hang": "did not go on: no rank computed, printed or ended a collective for 0.5 s"}


def hundred_faults():
    kinds = itertools.cycle(itertools.product(TOLD, ("before", "in", "after")))
    for number, kind in zip(range(100), kinds, strict=False):
        world_size = 2 + number * 3 % 7
        yield *kind, world_size, number * 5 % world_size


def outcome(fault, when, world_size, culprit):
    """What was wrong about how a launch with this fault ended, and its seconds."""
    start = time.monotonic()
    try:
        launch(faulty, world_size, fault, when, culprit, timeout=0.5 if fault == "hang" else 60)
        wrong = "no error"
    except RankError as error:
        wrong = "" if error.ranks == (culprit,) and f"rank {culprit} {TOLD[fault]}" in str(error) else str(error)
    return wrong, time.monotonic() - start


@pytest.mark.alone(only_rerun="Late")
def test_100_of_100_faults_name_the_rank_and_leave_no_process(processes_left):
    """Two launches at a time: mostly they wait."""
    faults = [*hundred_faults()]
    assert len(set(faults)) >= 84
    began, wrong, slowest = time.monotonic(), [], 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for pair in zip(faults[::2], faults[1::2], strict=True):
            outcomes, left = list(pool.map(lambda fault: outcome(*fault), pair)), processes_left()
            wrong += [(*fault, round(seconds, 1), left, told)
                      for fault, (told, seconds) in zip(pair, outcomes, strict=True) if told or left]
            slowest = max(slowest, *(seconds for _, seconds in outcomes))
    assert not wrong, f"{len(wrong)} of 100: {wrong}"
    within(slowest, 5)
    within(time.monotonic() - began, 120)


@patiently
def test_an_exception_comes_with_the_traceback_of_its_rank_and_as_the_cause():
    def deeper(comm):
        if comm.rank == 1:
            raise KeyError("the missing key")
        comm.barrier()

    with in_time(5):
        error = failure("rank 1 raised KeyError: 'the missing key'", deeper, 3)
    assert (error.rank, error.ranks) == (1, (1,))
    assert "in deeper" in str(error) and 'raise KeyError("the missing key")' in str(error)
    assert "worker.py" not in str(error), "our own frames are of no interest"
    assert isinstance(error.__cause__, KeyError) and error.__cause__.args == ("the missing key",)
    assert pickle.loads(pickle.dumps(error)).ranks == (1,)


def test_an_exception_that_cannot_be_pickled_is_told_in_words():
    class Stubborn(Exception):
        def __init__(self, lock):
            super().__init__("holds a lock")
            self.lock = lock

    def fn(comm):
        raise Stubborn(threading.Lock())

    assert failure("rank 0 raised .*Stubborn: holds a lock", fn, 1).__cause__ is None


def test_an_exception_that_cannot_be_made_again_is_told_in_words():
    class TwoArguments(Exception):
        def __init__(self, first, second):
            super().__init__(f"{first} and {second}")

    def fn(comm):
        raise TwoArguments(1, 2)

    assert failure("rank 0 raised .*TwoArguments: 1 and 2", fn, 1).__cause__ is None


def test_all_that_raise_are_named_the_first_first(tmp_path, monkeypatch):
    monkeypatch.setattr("refimpl.ranks.launched_ranks.SECONDS_TO_ARRIVE", 2)
    told = tmp_path / "told"

    class Told(ValueError):
        def __reduce__(self):  # called when a rank reports it
            told.touch()
            return super().__reduce__()

    def fn(comm):
        if comm.rank == 2:
            raise Told("I am 2")
        while comm.rank == 1 and not told.exists():
            time.sleep(0.001)
        if comm.rank == 1:
            raise ValueError("I am 1")
        comm.barrier()

    error = failure("rank 2 raised .*Told: I am 2", fn, 3)
    assert error.rank == 2 and "rank 1, too, raised ValueError: I am 1" in str(error)


def test_whoever_breaks_a_connection_is_named_not_those_who_noticed_and_wrapped_it():
    def fn(comm):
        if comm.rank == 2:
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.all_reduce(torch.ones(10))
        except RuntimeError as error:
            raise LookupError("the step failed") from error

    for _ in range(5):
        failure("rank 2 was killed by SIGKILL", fn, 4)


def test_whoever_raised_is_named_not_those_who_were_told_and_raise_too():
    def fn(comm):
        if comm.rank == 1:
            time.sleep(0.02)
            raise ValueError("mine")
        raise RankError("rank 1 raised ValueError: mine", [1])

    for _ in range(3):
        error = failure("^rank 1 raised ValueError: mine", fn, 3)
        assert error.ranks == (1,) and isinstance(error.__cause__, ValueError)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGINT])
def test_a_signal_is_named(number):
    def fn(comm):
        if comm.rank == 1:
            signal.signal(number, signal.SIG_DFL) if number != signal.SIGSEGV else None
            os.kill(os.getpid(), number)
        comm.barrier()

    told = str(failure(f"rank 1 was killed by {number.name}", fn, 2))
    assert number != signal.SIGSEGV or "where it was" in told and "in fn" in told  # faulthandler told where


@pytest.mark.parametrize("code, told", [(0, "0"), (4, "4"), (None, "None"), ("no data", "'no data'")])
def test_sys_exit_is_a_fault_too(code, told):
    def fn(comm):
        if comm.rank == 0:
            sys.exit(code)
        comm.barrier()

    failure(f"rank 0 exited with code {told} .sys.exit. before it returned", fn, 2)


@on_ranks(2, fails="(?s)rank 1 exited with code 1 before it returned.*out of luck", launch=launch)
def test_the_last_words_of_a_rank_that_dies_are_in_the_message(comm):
    if comm.rank == 1:
        print("out of luck", file=sys.stderr)
        os._exit(1)
    comm.barrier()


def where_it_hangs(comm):
    if comm.rank == 1:
        time.sleep(1000)
    comm.barrier()


@patiently
def test_a_hang_says_where():
    with in_time(5):
        error = failure("rank 1 did not go on: no rank computed, printed or ended a collective for 1 s",
                        where_it_hangs, 4, timeout=1)
    assert error.ranks == (1,) and "ranks 0, 2 and 3 waited for others in barrier" in str(error)
    assert "in where_it_hangs\n    time.sleep(1000)" in str(error)


@patiently
def test_a_hang_at_the_start_counts_from_the_start(monkeypatch):
    class SlowToArrive:
        def __reduce__(self):
            return time.sleep, (1000,)

    monkeypatch.setattr("refimpl.ranks.launched_ranks.SECONDS_TO_START", 1)
    failure("ranks 0 and 1 did not answer within 1 s", print, 2, SlowToArrive(), timeout=1000)
    with in_time(5):
        failure("rank 1 did not go on", where_it_hangs, 2, timeout=1)  # the same limit for both


def test_a_hang_in_c_code_that_holds_the_interpreter():
    def fn(comm, computes):
        while comm.rank == 1:
            sum(range(10**7)) if computes else ctypes.PyDLL(None).sleep(1000)
        comm.barrier()

    failure("rank 1 did not return within 1 s, the limit", fn, 2, True, timeout=0.5, limit=1)
    failure("rank 1 did not go on.* for 1 s", fn, 2, False, timeout=1)


@on_ranks(2, fails="(?s)ranks 0 and 1 did not go on.* for 1 s.*waited for others in recv.*debug=True", launch=launch,
          timeout=1)
def test_when_all_wait_for_each_other_all_are_named(comm):
    comm.recv(torch.zeros(1), 1 - comm.rank)


@on_ranks(2, fails="rank 1 did not go on.* for 1 s; rank 0 had returned", launch=launch, timeout=1)
def test_those_that_had_returned_are_named(comm):
    if comm.rank:
        comm.recv(torch.ones(1), 0)


def out_of_batches(comm, batches):
    row = comm.split([0, 1] if comm.rank < 2 else [2])
    for _ in range(batches[comm.rank]):
        comm.all_reduce(torch.ones(3), label="gradients")
        time.sleep(0.05)
    row.all_gather(torch.ones(comm.rank + 1))


@patiently
def test_a_rank_that_returns_while_others_wait_for_it_is_named_at_once():
    with in_time(5):
        early = failure(r"^rank 0 returned after 0 collectives; rank 1 waits for it in barrier \(#1\)",
                        lambda comm: comm.barrier() if comm.rank else None, 2)
        late = failure("", out_of_batches, 3, (9, 9, 5))
    assert early.ranks == (0,) and late.ranks == (2,) and str(late).splitlines() == [
        "rank 2 returned after 6 collectives; ranks 0 and 1 wait for it in all_reduce of gradients, (3,) float32, op "
        "sum (#7)",
        "every rank calls every collective: let all end together, for example when the first has no batch left"]


def test_of_a_sub_group_too_and_who_comes_late_is_waited_for():
    def fn(comm, slow):
        row = comm.split([0, 2] if comm.rank != 1 else [1])
        if comm.rank == 0 or slow and comm.rank:
            time.sleep(slow)
            row.all_reduce(torch.ones(1))

    assert failure("^in the group of ranks 0 and 2: rank 2 returned after 0 collectives; rank 0 waits for it in "
                   "all_reduce", fn, 3, 0).ranks == (2,)
    assert launch(fn, 3, 0.8) == [None] * 3


def computes(comm, seconds, how):
    """Rank 0 uses CPU time, or a child of it does, or it prints, while rank 1 waits."""
    end = time.monotonic() + seconds
    while comm.rank == 0 and time.monotonic() < end:
        if how == "child":
            subprocess.run([sys.executable, "-c", f"import time\nwhile time.monotonic() < {end}: pass"], check=True)
        elif how != "itself":
            time.sleep(0.3)
        if how == "prints":
            print("a step")
    comm.barrier()
    return how


@pytest.mark.parametrize("how", ["itself", "child", "prints"])
def test_a_rank_that_goes_on_is_not_hung(how):
    assert launch(computes, 2, 3, how, timeout=1) == [how] * 2


@on_ranks(2, fails="^rank 1 did not go on.*\nrank 0 waited for others in barrier", launch=launch, timeout=1, limit=8)
def test_a_thread_that_looks_around_now_and_then_does_not_compute(comm):
    def look():
        while True:
            time.sleep(0.02)

    threading.Thread(target=look, daemon=True).start()
    where_it_hangs(comm)


@patiently
def test_collectives_that_end_are_signs_too():
    def fn(comm):
        for _ in range(9):
            time.sleep(0.3)
            comm.all_gather(torch.ones(1))
        time.sleep(1000)

    start = time.monotonic()
    with in_time(8):
        failure("did not go on", fn, 2, timeout=1)
    assert 3.5 < time.monotonic() - start


@patiently
def test_a_limit_ends_a_rank_that_computes():
    with in_time(5):
        error = failure("rank 0 did not return within 1.5 s, the limit", computes, 2, 1000, "itself", timeout=60,
                        limit=1.5)
    assert error.ranks == (0,) and "in computes" in str(error)


@on_ranks(3, launch=launch)
def test_a_rank_that_returns_early_breaks_no_connection(comm):
    if comm.rank == 0:
        comm.send(torch.ones(100_000), 1, async_op=True)
    else:
        time.sleep(0.3)
    assert comm.rank != 1 or comm.recv(torch.empty(100_000), 0).sum() == 100_000


@on_ranks(2, fails="rank 1 returned an unpicklable value: the result cannot be pickled: dict: .*lock", launch=launch)
def test_a_result_that_cannot_be_pickled_is_named(comm):
    return {"model": 3, "loader": [1, threading.Lock()]} if comm.rank == 1 else comm.barrier()


def test_a_rank_that_cannot_begin():
    class Unwilling:
        def __reduce__(self):
            return int, ("not a number",)

    error = failure("rank . raised ValueError: invalid literal for int", print, 2, Unwilling())
    assert isinstance(error.__cause__, ValueError)


def test_after_any_fault_the_next_launch_works():
    failure("", lambda comm: 1 / 0, 2)
    assert launch(lambda comm: comm.rank, 2) == [0, 1]


@patiently
def test_an_interrupt_leaves_nothing(processes_left):
    def fn(comm):
        comm.barrier()
        time.sleep(1000)

    timer = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    timer.start()
    with in_time(5), pytest.raises(KeyboardInterrupt):
        launch(fn, 4)
    assert processes_left() == []
    timer.join()
