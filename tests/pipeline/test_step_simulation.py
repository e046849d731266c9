"""A step in time, against figures by hand, against another way to compute it, and over a link."""

import re
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import processor_seconds

from refimpl.comm import Link
from refimpl.pipeline.drawing import draw
from refimpl.pipeline.instructions import BACKWARD, FORWARD, INPUT, WEIGHT, Instruction, Schedule
from refimpl.pipeline.named_schedules import BUILDERS, schedule
from refimpl.pipeline.step_simulation import Costs, simulate
from refimpl.pipeline.validate import DeadlockError, ScheduleError

TWO = schedule("1f1b", 2, 2)


@pytest.mark.core
def test_two_ranks_by_hand():
    """Rank 0: F F . . FULL . FULL; rank 1: . F FULL F FULL."""
    step = simulate(TWO, Costs(1, 1, 1))
    assert [[timed[1:] for timed in rank] for rank in step.ranks] == [
        [(0, 1), (1, 2), (4, 6), (7, 9)], [(1, 2), (2, 4), (4, 5), (5, 7)]]
    assert step.step_time == 9 and step.idle == (3, 0)
    assert step.activations_over_time(0) == [(0, 0), (0, 1), (1, 2), (6, 1), (9, 0)]
    assert step.in_flight == ((2, 2, 0), (1, 1, 0))


@pytest.mark.core
def test_a_gradient_leaves_before_the_weights_gradients():
    """The same two ranks with backwards in two: the last rank's W is no longer waited for."""
    step = simulate(schedule("zb-h1", 2, 2), Costs(1, 1, 1))
    assert [[(str(i)[0], *t) for i, *t in rank] for rank in step.ranks] == [
        [("F", 0, 1), ("F", 1, 2), ("B", 3, 4), ("W", 4, 5), ("B", 5, 6), ("W", 6, 7)],
        [("F", 1, 2), ("B", 2, 3), ("F", 3, 4), ("B", 4, 5), ("W", 5, 6), ("W", 6, 7)]]
    assert step.step_time == 7 and step.idle == (1, 0)


def test_costs_of_each_stage():
    step = simulate(TWO, [Costs(1, 2, 3), (2, 1, 1)])
    assert [[timed[1:] for timed in rank] for rank in step.ranks] == [
        [(0, 1), (1, 2), (5, 10), (10, 15)], [(1, 3), (3, 5), (5, 7), (7, 9)]]
    assert step.idle == (3, 0) and step.step_time == 15


def test_messages_take_time_and_leave_one_by_one():
    """4 bytes at 2 a second, and 1 second of latency: 3. Rank 0 sends twice: the second message waits for the first."""
    step = simulate(TWO, link=Link(2, 1), message_bytes=4)
    first, *_ = zip(*step.ranks, strict=True)
    assert [timed.begin for timed in first] == [0, 4]  # F at 0 to 1, 3 on the way
    forward = next(timed for timed in step.ranks[1] if timed.instruction == Instruction(FORWARD, 1, 1))
    assert forward.begin == max(1 + 3 + 3, 4 + 3)  # the first message is in the way until 4
    assert step.ranks[0][2].begin == 4 + 1 + 2 + 3 and step.ranks[0][3].begin == 8 + 2 + 3 and step.step_time == 15
    assert simulate(TWO, link=Link(float("inf")), message_bytes=4).ranks == simulate(TWO).ranks


def test_a_message_has_the_size_of_the_boundary_that_it_crosses():
    """What leaves stage 0 has 2 bytes, and so has its gradient, which stage 1 sends; between 1 and 2 are 5."""
    step = simulate(schedule("gpipe", 3, 1), message_bytes=[2, 5, 7], link=Link(1))
    assert [timed.begin for rank in step.ranks for timed in rank] == [0, 19 + 2, 1 + 2, 12 + 5, 4 + 5, 10]


def test_no_message_between_stages_of_one_rank():
    """On the last rank of a V the forward turns around without one."""
    step = simulate(schedule("zb-v", 2, 1), link=Link(1), message_bytes=10)
    down, up = (timed for timed in step.ranks[1] if timed.instruction.kind == FORWARD)
    assert down.begin == 11 and up.begin == down.end == 12


def test_bytes_of_activations():
    """An activation is whole until B, and a part of it until W; stages may differ."""
    step = simulate(schedule("zb-h1", 2, 2), activation_bytes=[100, 60], kept_bytes=[70, 10])
    assert step.nbytes(0) == [(0, 0), (0, 100), (1, 200), (4, 170), (5, 100), (6, 70), (7, 0)]
    assert step.nbytes(1) == [(0, 0), (1, 60), (3, 10), (3, 70), (5, 20), (6, 10), (7, 0)]
    assert step.peak_bytes == (200, 70)
    everything = simulate(schedule("zb-h1", 2, 2), activation_bytes=[100, 60])
    assert everything.peak_bytes == (200, 120) and everything.nbytes(1)[-1] == (7, 0)


@given(st.sampled_from(list(BUILDERS)), st.integers(1, 5), st.integers(1, 10),
       st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)))
def test_held_is_what_the_order_says(name, ranks, micro_batches, costs):
    step = simulate(schedule(name, ranks, micro_batches), costs and Costs(*costs), activation_bytes=7)
    for r in range(ranks):
        assert max(n for _, n in step.activations_over_time(r)) == step.in_flight[r].peak == step.peak_bytes[r] / 7
        assert step.activations_over_time(r)[-1][1] == 0


def by_ticks(built, costs):
    """The step's (begin, end) of each instruction by a clock: at each tick every free rank takes its next instruction
    if it can. Costs are integers above 0."""
    ends, at, busy, found, now = {}, [0] * len(built.ranks), [0] * len(built.ranks), {}, 0
    while len(found) < sum(map(len, built.ranks)):
        for rank, order in enumerate(built.ranks):
            if busy[rank] > now or at[rank] == len(order):
                continue
            kind, s, j = each = order[at[rank]]
            needs = {FORWARD: [(FORWARD, s - 1, j)] * (s > 0), WEIGHT: [(INPUT, s, j)]}.get(
                kind, [(FORWARD, s, j)] + [(INPUT, s + 1, j)] * (s + 1 < built.stages))
            if all(ends.get(need, now + 1) <= now for need in needs):
                f, b, w = costs[s]
                busy[rank] = now + {FORWARD: f, INPUT: b, WEIGHT: w, BACKWARD: b + w}[kind]
                ends[(INPUT, s, j) if kind == BACKWARD else each] = busy[rank]
                found[each] = (now, busy[rank])
                at[rank] += 1
        now += 1
    return found


@given(st.data(), st.sampled_from(list(BUILDERS)), st.integers(1, 5), st.integers(1, 8))
def test_times_are_those_of_a_clock(data, name, ranks, micro_batches):
    built, cost = schedule(name, ranks, micro_batches), st.integers(1, 4)
    costs = [Costs(*data.draw(st.tuples(cost, cost, cost))) for _ in range(built.stages)]
    found = {each: (begin, end) for rank in simulate(built, costs).ranks for each, begin, end in rank}
    assert found == by_ticks(built, costs)


def test_exact_numbers_stay_exact():
    assert simulate(schedule("1f1b", 4, 8), Costs(*[Fraction(1, 3)] * 3)).idle == (3, 2, 1, 0)


def test_a_schedule_that_cannot_run_is_refused_as_by_validate():
    forward_twice = Schedule("x", (TWO.ranks[0], TWO.ranks[1] + TWO.ranks[1][:1]), TWO.rank_of, 2)
    with pytest.raises(ScheduleError, match="rank 1 has F of stage 1, micro-batch 0 twice"):
        simulate(forward_twice)
    (a, b, c, d), second = TWO.ranks
    with pytest.raises(DeadlockError, match="rank 0 is at FULL of stage 0, micro-batch 0, and waits"):
        simulate(Schedule("x", ((a, c, b, d), (second[0], second[2], second[1], second[3])), TWO.rank_of, 2))


@pytest.mark.parametrize(("arguments", "words"), [
    ({"costs": [Costs()] * 3}, "costs of 3 stages: expected one for all, or a list of 2"),
    ({"costs": Costs(1, -1, 1)}, "expected numbers of at least 0"),
    ({"costs": Costs(1, float("nan"), 1)}, "expected numbers of at least 0"),
    ({"activation_bytes": [1]}, "activation_bytes of 1 stages: expected one for all, or a list of 2"),
    ({"message_bytes": -4}, "message_bytes=-4: expected numbers of at least 0"),
    ({"kept_bytes": [1, -1]}, "kept_bytes=[1, -1]: expected numbers of at least 0")])
def test_bad_numbers_are_named(arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        simulate(TWO, **arguments)


@pytest.mark.parametrize("name", BUILDERS)
def test_64_ranks_within_a_second(name):
    """Built, simulated, drawn and written as a picture; seconds of this process, so that others do not count."""
    seconds = []
    for _ in range(3):  # fonts are found once, and the collector of garbage passes now and then
        begin = time.process_time()
        picture = draw(simulate(schedule(name, 64, 128), activation_bytes=2**20))._repr_png_()
        seconds.append(processor_seconds(time.process_time() - begin))
        if seconds[-1] < 1:
            break
    assert seconds[-1] < 1 and len(picture) > 10_000
