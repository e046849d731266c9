"""From what is known of failed ranks to one message, with nothing started."""

import pickle
import signal
from pathlib import Path

import pytest

from refimpl.comm import CollectiveMismatch
from refimpl.ranks.errors import names
from refimpl.ranks.failure_report import blame, died, explained, hung, show, threads, waiting_in
from refimpl.ranks.launched_ranks import LaunchedRank
from refimpl.ranks.worker import TORCH_DISTRIBUTED, RankFailure
from refimpl.ranks.world import World

FOLDER, HINT = "/refimpl/comm", "debug=True compares what ranks are about to do"
STACK = f'''Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 3 in wait

Current thread 0x00007f02 (most recent call first):
  File "{TORCH_DISTRIBUTED}/distributed_c10d.py", line 10 in barrier
  File "{TORCH_DISTRIBUTED}/c10d_logger.py", line 11 in wrapper
  File "{FOLDER}/communicator.py", line 12 in barrier
  File "/home/cell.py", line 13 in step
  File "/refimpl/ranks/worker.py", line 14 in run
  File "<string>", line 1 in <module>
'''


class Connected(World):
    folders, hint = (FOLDER,), HINT


def ended(status, value=None, errors=b"", stacks=b""):
    rank = LaunchedRank(2)
    rank.status, rank.value, rank.errors, rank.stacks = status, value, errors, stacks
    return died(rank, 7.0, HINT)


@pytest.mark.parametrize("status, value, what", [
    (3 << 8, None, "exited with code 3 before it returned"),
    (0, b"result", "exited with code 0 after it had returned, while others ran"),
    (signal.SIGTERM, None, "was killed by SIGTERM (signal 15) before it returned"),
    (signal.SIGSEGV | 0x80, None, "was killed by SIGSEGV (signal 11) before it returned"),  # with a core dump
    (signal.SIGKILL, None,
     "was killed by SIGKILL (signal 9) before it returned; the kernel does that too when memory runs out"),
    (signal.SIGBUS, None,
     f"was killed by SIGBUS (signal {signal.SIGBUS:d}) before it returned; the kernel does that when a mapped file was "
     "cut short, or its file system is full: for the workers of a DataLoader that is /dev/shm (df -h /dev/shm; docker "
     "run --shm-size)")])
def test_how_a_rank_ended(status, value, what):
    failure = ended(status, value)
    assert (failure.rank, failure.what, failure.when, failure.consequence) == (2, what, 7.0, False)


def test_a_rank_that_gloo_aborts_may_be_a_consequence_and_its_last_words_are_told():
    failure = ended(signal.SIGABRT, errors=b"Received data size doesn't match \xff", stacks=STACK.encode())
    assert failure.consequence and "debug=True" in failure.what
    assert failure.text.startswith("the last that it wrote to stderr:\nReceived data size")
    assert 'where it was:\n  File "/home/cell.py", line 13, in step' in failure.text


def test_blame_goes_to_what_nothing_else_explains_then_to_the_dead_then_to_the_earliest():
    broken = RankFailure(0, "raised RuntimeError: Connection closed", when=1, consequence=True)
    late = RankFailure(1, "raised ValueError: b", when=3)
    early = RankFailure(2, "raised KeyError: a\nmore", "its lines", when=2)
    dead = RankFailure(3, "exited with code 1", when=4)
    error = blame([broken, late, early], set())
    assert error.ranks == (2,)
    assert str(error) == "rank 2 raised KeyError: a\nmore\nrank 1, too, raised ValueError: b\n\nits lines"
    assert blame([broken, late, early, dead], {3}).rank == 3
    assert blame([broken], set()).rank == 0
    assert blame([broken, RankFailure(1, "was killed by SIGABRT", when=5, consequence=True)], {1}).rank == 1


def test_what_explains_consequences_is_told_first_and_keeps_its_class():
    asked, better = [], CollectiveMismatch("rank 2 began other collectives", [2])
    broken, own = RankFailure(0, "was killed by SIGABRT", consequence=True), RankFailure(1, "raised ValueError: b")
    error = blame([broken], {0}, lambda: asked.append(1) or better)
    assert (type(error), error.ranks) == (CollectiveMismatch, (2,))
    assert str(error) == f"{better}\n\nrank 0 was killed by SIGABRT"
    assert blame([broken, own], {0}, lambda: asked.append(1) or better).ranks == (1,) and asked == [1]
    assert blame([broken], {0}, lambda: None).ranks == (0,) and explained(error, None) is error


def test_the_exception_itself_is_the_cause_or_its_loss_is_told():
    raised = RankFailure(1, "raised ValueError: x", exception=pickle.dumps(ValueError("x")))
    assert isinstance(blame([raised], set()).__cause__, ValueError)
    lost = blame([RankFailure(1, "raised Odd: x", exception=b"no pickle")], set())
    assert lost.__cause__ is None and "(the exception itself could not be unpickled: " in str(lost)
    mismatch = RankFailure(1, "raised …", "lines", exception=pickle.dumps(CollectiveMismatch("rank 2 differs", [2])))
    error = blame([mismatch], set())
    assert (type(error), error.ranks, str(error)) == (CollectiveMismatch, (2,), "rank 2 differs\n\nlines")


def test_threads_of_a_stack_without_our_own_beginning():
    waits, works = threads(STACK)
    assert waits == [("/lib/threading.py", 3, "wait")]
    assert [name for _, _, name in works] == ["barrier", "wrapper", "barrier", "step"]
    assert waiting_in([waits, works], (FOLDER, TORCH_DISTRIBUTED)) == "barrier"
    assert waiting_in([waits], (FOLDER, TORCH_DISTRIBUTED)) is None
    assert threads("") == []


def test_a_hang_names_those_that_do_not_wait():
    busy = 'Current thread 0x01 (most recent call first):\n  File "/home/cell.py", line 5 in spin\n'
    error = hung({0: STACK, 1: busy, 3: ""}, "did not return within 2.5 s", [2], Connected(4))
    assert error.ranks == (1, 3)
    assert str(error).startswith(
        "ranks 1 and 3 did not return within 2.5 s; rank 3 did not even answer a signal: stopped, or deep in C "
        "code; rank 2 had returned\nrank 0 waited for others in barrier\n\nwhere rank 1 was:\n")
    assert "debug=True" not in str(error)
    error = hung({0: STACK, 1: STACK}, "did not go on", [], Connected(2))
    assert error.ranks == (0, 1) and "ranks 0 and 1 waited for others in barrier\ndebug=True" in str(error)


def test_frames_are_shown_as_a_traceback_shows_them():
    shown = show([(__file__, 1, "inner"), ("/no/such/file", 2, "outer")])
    assert shown == (f'  File "/no/such/file", line 2, in outer\n  File "{__file__}", line 1, in inner\n'
                     f'    {Path(__file__).read_text().splitlines()[0]}')
    assert (names([1]), names([0, 2, 3])) == ("rank 1", "ranks 0, 2 and 3")
