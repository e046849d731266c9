"""One thread at a time, whoever waits gives way, and what fails ends all."""

import threading

import pytest

from refimpl.comm import CollectiveMismatch, RankError
from refimpl.comm.turns import Turns


def test_who_waits_gives_way_and_the_next_that_can_goes_on():
    turns, log, ready = Turns(3), [], set()

    def work(rank):
        log.append((rank, "begins"))
        turns.wait(rank, lambda: rank in ready or rank == 2, f"{rank} in ready")
        ready.update({2: {0}, 0: {1}}.get(rank, ()))
        log.append((rank, "goes on"))
        return rank * rank

    assert turns.run(work) == [0, 1, 4]
    assert log == [(0, "begins"), (1, "begins"), (2, "begins"), (2, "goes on"), (0, "goes on"), (1, "goes on")]


def test_what_nobody_begins_is_said_and_who_waits_for_it():
    turns = Turns(2)
    with pytest.raises(CollectiveMismatch, match="rank 1 returned, and others wait .*:\n  rank 0: the sun") as raised:
        turns.run(lambda rank: rank or turns.wait(0, lambda: False, "the sun"))
    assert raised.value.ranks == (1,)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_ends_all_that_wait_and_cleans_up_there(error):
    turns, cleaned = Turns(3), []

    def work(rank):
        try:
            turns.wait(rank, lambda: rank == 2, "the third")
            raise error("it")
        finally:
            cleaned.append(rank)

    with pytest.raises(RankError if error is ValueError else error):
        turns.run(work)
    assert sorted(cleaned) == [0, 1, 2]
    assert not [thread for thread in threading.enumerate() if thread.name in ("rank 0", "rank 1", "rank 2")]
