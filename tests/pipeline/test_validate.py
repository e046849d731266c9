"""What cannot run is named, without running or waiting; what can run is counted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.pipeline.instructions import BACKWARD, FORWARD, INPUT, WEIGHT, Instruction, Schedule
from refimpl.pipeline.named_schedules import BUILDERS, schedule
from refimpl.pipeline.validate import DeadlockError, InFlight, ScheduleError, in_flight, validate


def changed(built, rank, change, **fields):
    """The schedule with `change(list of rank)` in place of a rank's list."""
    orders = [list(order) for order in built.ranks]
    orders[rank] = change(orders[rank])
    given = {"rank_of": built.rank_of, "micro_batches": built.micro_batches, **fields}
    return Schedule(built.name, tuple(map(tuple, orders)), **given)


def swapped(a, b):
    return lambda order: [{a: b, b: a}.get(each, each) for each in order]


def without(each):
    return lambda order: [other for other in order if other != each]


def replaced(old, new):
    return lambda order: [new if each == old else each for each in order]


F, B, W, FULL = ([[Instruction(kind, s, j) for j in range(8)] for s in range(8)]
                 for kind in (FORWARD, INPUT, WEIGHT, BACKWARD))
ONE, H1, V = schedule("1f1b", 4, 8), schedule("zb-h1", 4, 8), schedule("zb-v", 4, 8)


@pytest.mark.core
@pytest.mark.parametrize(("mutant", "words"), [
    (changed(ONE, 3, swapped(F[3][2], FULL[3][2])), "rank 3 has FULL of stage 3, micro-batch 2 in place 4, and it "
     "waits for F of stage 3, micro-batch 2, in place 5"),
    (changed(H1, 1, swapped(B[1][2], W[1][2])), "rank 1 has W of stage 1, micro-batch 2 in place 8, and it waits for "
     "B of stage 1, micro-batch 2, in place 12"),
    (changed(ONE, 2, without(F[2][3])), "rank 2 lacks F of stage 2, micro-batch 3: expected once"),
    (changed(ONE, 2, without(FULL[2][3])), "rank 2 lacks B of stage 2, micro-batch 3 (or its FULL): expected once"),
    (changed(H1, 0, without(W[0][7])), "rank 0 lacks W of stage 0, micro-batch 7: expected once"),
    (changed(H1, 0, without(B[0][7])), "rank 0 lacks B of stage 0, micro-batch 7: expected once"),
    (changed(H1, 0, replaced(B[0][7], FULL[0][7])), "rank 0 has W of stage 0, micro-batch 7, and FULL of the same"),
    (changed(ONE, 1, lambda order: order + [F[1][0]]), "rank 1 has F of stage 1, micro-batch 0 twice: expected once"),
    (changed(ONE, 1, lambda order: order + [F[2][0]]), "rank 1 has F of stage 2, micro-batch 0: stage 2 is on rank 2"),
    (changed(ONE, 1, lambda order: order + [F[7][0]]), "expected a stage of 0 to 3"),
    (changed(ONE, 1, lambda order: order + [Instruction("F", 1, 8)]), "expected a micro-batch of 0 to 7"),
    (changed(ONE, 1, replaced(F[1][0], Instruction("forward", 1, 0))), "kind 'forward': expected one of F, FULL, B, W"),
    (changed(ONE, 1, list, micro_batches=0), "micro_batches=0: expected an integer of at least 1"),
    (changed(ONE, 1, list, rank_of=(0, 1, 2, 4)), "stage 3 is on rank 4: expected one of 0 to 3"),
    (changed(ONE, 1, list, rank_of=(0, 1, 2, 2)), "rank 3 has no stage")])
def test_what_is_wrong_is_named(mutant, words):
    with pytest.raises(ScheduleError) as error:
        validate(mutant)
    assert words in str(error.value) and not isinstance(error.value, DeadlockError)


@pytest.mark.core
def test_a_deadlock_is_a_circle_of_ranks_that_wait_for_each_other():
    """Rank 0 wants its first gradient before it sends a second micro-batch; rank 1 computes two forwards first."""
    mutant = changed(schedule("1f1b", 2, 4), 0, swapped(F[0][1], FULL[0][0]))
    mutant = changed(mutant, 1, swapped(F[1][1], FULL[1][0]))
    with pytest.raises(DeadlockError) as error:
        validate(mutant)
    assert error.value.circle == ((0, FULL[0][0], FULL[1][0], 1), (1, F[1][1], F[0][1], 0))
    assert str(error.value) == (
        "schedule '1f1b' deadlocks: "
        "rank 0 is at FULL of stage 0, micro-batch 0, and waits for FULL of stage 1, micro-batch 0, on rank 1; "
        "rank 1 is at F of stage 1, micro-batch 1, and waits for F of stage 0, micro-batch 1, on rank 0. "
        "Put on one of these ranks what is waited for before what the rank is at")


def test_a_deadlock_of_two_stages_of_one_rank():
    """On the last rank of a V the way up comes from the same rank: one rank can wait for itself."""
    mutant = changed(V, 3, swapped(F[3][0], F[4][0]))
    with pytest.raises(DeadlockError) as error:
        validate(mutant)
    assert error.value.circle == ((3, F[4][0], F[3][0], 3),)


def test_ranks_that_only_wait_for_the_circle_are_not_in_it():
    built = schedule("1f1b", 4, 8)
    for rank in (2, 3):
        own = swapped(F[rank][1], FULL[rank][0]) if rank == 3 else lambda order: sorted(
            order, key=lambda each: (each.micro_batch, each.kind != FORWARD))
        built = changed(built, rank, own)
    with pytest.raises(DeadlockError) as error:
        validate(built)
    assert {blocked.rank for blocked in error.value.circle} == {2, 3}


def test_activations_are_counted_apart():
    assert validate(H1) == (InFlight(4, 4, 1), InFlight(4, 3, 2), InFlight(4, 2, 3), InFlight(4, 1, 4))
    assert validate(ONE) == tuple(InFlight(4 - r, 4 - r, 0) for r in range(4))


def count_without_w(order):
    """A mutant: takes an activation to be freed by its B."""
    held = most = 0
    for kind, *_ in order:
        held += (kind == FORWARD) - (kind in (BACKWARD, INPUT))
        most = max(most, held)
    return most


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zero-bubble"])
def test_a_count_without_w_is_too_small(name):
    built = schedule(name, 4, 8)
    assert all(count_without_w(order) == in_flight(order).before_backward for order in built.ranks)
    assert count_without_w(built.ranks[3]) < in_flight(built.ranks[3]).peak


def slow_validity(built):
    """Whether a complete schedule can run, by trying: all ranks again and again, until none gets on."""
    done, at, got_on = set(), [0] * len(built.ranks), True
    while got_on:
        got_on = False
        for rank, order in enumerate(built.ranks):
            if at[rank] == len(order):
                continue
            kind, s, j = order[at[rank]]
            gradient = {(INPUT, s + 1, j), (BACKWARD, s + 1, j)} & done or s + 1 == built.stages
            if {FORWARD: s == 0 or (FORWARD, s - 1, j) in done, WEIGHT: (INPUT, s, j) in done}.get(
                    kind, (FORWARD, s, j) in done and gradient):
                done.add(order[at[rank]])
                at[rank] += 1
                got_on = True
    return all(map(len, built.ranks)) and at == [len(order) for order in built.ranks]


@given(st.data(), st.sampled_from(list(BUILDERS)), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
def test_moved_instructions_are_found_whenever_they_deadlock(data, name, ranks, micro_batches, moves):
    """Valid orders with some instructions moved: `validate` agrees with trying."""
    built = schedule(name, ranks, micro_batches)
    orders = [list(order) for order in built.ranks]
    for _ in range(moves):
        order = data.draw(st.sampled_from(orders))
        each = order.pop(data.draw(st.integers(0, len(order) - 1)))
        order.insert(data.draw(st.integers(0, len(order))), each)
    mutant = Schedule(name, tuple(map(tuple, orders)), built.rank_of, micro_batches)
    if slow_validity(mutant):
        for count, before in zip(validate(mutant), mutant.ranks, strict=True):
            assert count.before_backward == count_without_w(before)
    else:
        with pytest.raises(ScheduleError, match="waits for"):
            validate(mutant)


@given(st.data(), st.sampled_from(list(BUILDERS)), st.integers(1, 4), st.integers(1, 5))
def test_any_instruction_dropped_or_doubled_is_named(data, name, ranks, micro_batches):
    built = schedule(name, ranks, micro_batches)
    rank = data.draw(st.integers(0, ranks - 1))
    each = data.draw(st.sampled_from(built.ranks[rank]))
    missing = each._replace(kind=INPUT) if each.kind == BACKWARD else each
    with pytest.raises(ScheduleError, match=f"rank {rank} lacks {missing}"):
        validate(changed(built, rank, without(each)))
    with pytest.raises(ScheduleError, match=f"rank {rank} has {each} twice"):
        validate(changed(built, rank, lambda order: [*order, each]))


def shuffled(data, order):
    """The list in any order in which F precedes B precedes W."""
    places = data.draw(st.permutations([each[1:] for each in order]))
    left = {key: sorted((each for each in order if each[1:] == key), key=lambda x: (
        FORWARD, INPUT, BACKWARD, WEIGHT).index(x.kind)) for key in places}
    return tuple(left[key].pop(0) for key in places)


@given(st.data(), st.sampled_from(["1f1b", "zb-h1", "zb-v"]), st.integers(2, 4), st.integers(1, 4))
def test_who_waits_for_whom_is_a_circle(data, name, ranks, micro_batches):
    """Each rank of it is at an instruction that does not come after the one that the rank before it waits for."""
    built = schedule(name, ranks, micro_batches)
    mutant = Schedule(name, tuple(shuffled(data, order) for order in built.ranks), built.rank_of, micro_batches)
    if slow_validity(mutant):
        assert len(validate(mutant)) == ranks
        return
    with pytest.raises(DeadlockError) as error:
        validate(mutant)
    circle = error.value.circle
    for blocked, after in zip(circle, circle[1:] + circle[:1], strict=True):
        order = mutant.ranks[after.rank]
        assert blocked.on_rank == after.rank and order.index(after.instruction) <= order.index(blocked.needs)
