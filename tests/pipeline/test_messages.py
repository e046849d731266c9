"""What goes between ranks, and when a rank may wait for what it has sent: no schedule comes to a stop, whatever takes
how long."""

import itertools

import pytest

from refimpl.pipeline import schedule
from refimpl.pipeline.messages import message_bytes, message_traffic, route
from refimpl.pipeline.named_schedules import BUILDERS

CASES = [(name, p, m) for name in BUILDERS for p in (1, 2, 3, 8) for m in (1, 2, 5, 16)]


def steps_of(turns, rank, at_once=False):
    """Return what a rank does, in order: ("post" | "arrive" | "left" | "send", message). The mutant waits `at_once`
    until what it sent has left."""
    for turn in turns:
        yield from (("post", message) for _, message in turn.room)
        if turn.needs is not None and turn.source != rank:
            yield "arrive", turn.needs
        yield from (("left", message) for message in turn.left if not at_once)
        if turn.makes is not None and turn.target != rank:
            yield "send", turn.makes
            if at_once:
                yield "left", turn.makes


def runs_to_the_end(plan, at_once=False):
    """Whether all ranks come to their end. What happens first makes no difference: nothing that has happened is undone.
    """
    ranks = range(len(plan.ranks))
    left = [list(steps_of(route(plan, rank), rank, at_once)) for rank in ranks]
    posted, sent, going = set(), set(), True
    while going:
        going = False
        for steps in left:
            while steps:
                kind, message = steps[0]
                if kind == "arrive" and message not in sent or kind == "left" and message not in posted:
                    break
                {"post": posted, "send": sent}.get(kind, set()).add(message)
                steps.pop(0)
                going = True
    return not any(left)


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_no_circle_of_ranks_waits_for_each_other(name, p, m):
    plan = schedule(name, p, m)
    assert runs_to_the_end(plan)
    for rank in range(p):
        turns = route(plan, rank)
        posted = [message for turn in turns for _, message in turn.room]
        needed = [turn.needs for turn in turns if turn.needs is not None and turn.source != rank]
        assert len(posted) == len({*posted}) and {*posted} == {*needed}
        places = {message: i for i, turn in enumerate(turns) for _, message in turn.room}
        assert all(places[turn.needs] <= i for i, turn in enumerate(turns) if turn.needs in places)


@pytest.mark.parametrize(("name", "p", "m"), CASES)
def test_messages_are_received_in_the_order_in_which_they_are_sent(name, p, m):
    turns = [route(schedule(name, p, m), rank) for rank in range(p)]
    for here, there in itertools.permutations(range(p), 2):
        sent = [turn.makes for turn in turns[here] if turn.target == there]
        assert sent == [message for turn in turns[there] for source, message in turn.room if source == here]


@pytest.mark.parametrize("name", ["interleaved", "zb-v"])
def test_a_version_that_waits_at_once_comes_to_a_stop(name):
    assert not runs_to_the_end(schedule(name, 4, 8), at_once=True)


def test_what_is_sent_is_freed_before_the_end():
    for name in BUILDERS:
        turns = route(schedule(name, 4, 8), 1)
        sent = [turn.makes for turn in turns if turn.target not in (None, 1)]
        freed = [message for turn in turns for message in turn.left]
        assert len(freed) >= len(sent) - 4 and {*freed} <= {*sent}


def test_bytes_of_stages_of_different_sizes():
    plan = schedule("1f1b", 3, 2)
    assert [message_traffic(plan, rank, [1, 10, 100]) for rank in range(3)] == [2, 2 * (10 + 1), 2 * 10]
    assert message_bytes(plan, 0, [1, 10, 100]) < 10 and message_bytes(plan, 2, [1, 10, 100]) >= 20


def test_a_rank_holds_three_messages_at_most_however_many_micro_batches():
    assert [message_bytes(schedule("1f1b", 2, m), rank=1, nbytes=10) for m in (4, 8, 16)] == [3 * 10] * 3
