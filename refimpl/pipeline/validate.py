"""Whether a schedule can run, found by arithmetic: nothing is computed, nothing is sent, and nobody waits.

    F of (s, j)             waits for F of (s − 1, j)
    B or FULL of (s, j)     waits for F of (s, j), and for B or FULL of (s + 1, j)
    W of (s, j)             waits for B of (s, j)

of stage s and micro-batch j. A rank goes on to its next instruction only when the one before is done. So a schedule
deadlocks if some ranks wait for each other in a circle, whatever anything costs.
"""

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from .instructions import BACKWARD, FORWARD, INPUT, WEIGHT, Instruction

if TYPE_CHECKING:
    from .instructions import Schedule

KINDS = (FORWARD, BACKWARD, INPUT, WEIGHT)


class ScheduleError(ValueError):
    """Raised for a schedule that is not complete, or that cannot run in its order."""


class Blocked(NamedTuple):
    """Says that `rank` is at `instruction` and cannot go on before `needs`, which is an instruction of `on_rank`."""

    rank: int
    instruction: Instruction
    needs: Instruction
    on_rank: int

    def __str__(self):
        return f"rank {self.rank} is at {self.instruction}, and waits for {self.needs}, on rank {self.on_rank}"


class DeadlockError(ScheduleError):
    """Raised for a schedule whose ranks wait for each other. `circle`: a Blocked of each of these ranks."""

    def __init__(self, name: str, circle: Any) -> None:
        self.circle = circle
        super().__init__(f"schedule {name!r} deadlocks: " + "; ".join(map(str, circle)) + ". Put on one of these ranks "
                         "what is waited for before what the rank is at")


class InFlight(NamedTuple):
    """Counts a rank's activations at the worst moment, in stages × micro-batches (chunks, if a rank has several).

    `peak`: from their F until their W, or FULL. `before_backward`: from F until B or FULL, whole activations.
    `before_weight`: from B until W, what the weights' gradients still need. Each has a worst moment of its own.
    """

    peak: int
    before_backward: int
    before_weight: int


def validate(schedule: "Schedule") -> tuple[InFlight, ...]:
    """Check that a schedule can run, and count activations. Returns an InFlight for each rank.

    Every stage has each micro-batch's F once, and its B and its W or else its FULL; each on the stage's rank; what an
    instruction waits for precedes it. ScheduleError names the first instruction for which this is not so; DeadlockError
    the ranks that wait for each other, what each is at and what it waits for. Nothing runs: it takes about a second for
    400,000 instructions.
    """
    check_complete(schedule)
    check_own_order(schedule)
    for _ in executed(schedule):
        pass
    return tuple(in_flight(order) for order in schedule.ranks)


def check_complete(schedule):
    """Raise ScheduleError unless each instruction is there once, on the rank that has its stage."""
    found = {}
    _check_ranks(schedule)
    for rank, order in enumerate(schedule.ranks):
        for each in order:
            _check_instruction(schedule, rank, each)
            if each in found:
                raise ScheduleError(f"rank {rank} has {each} twice: expected once")
            found[each] = rank
    for stage, rank in enumerate(schedule.rank_of):
        for j in range(schedule.micro_batches):
            _check_kinds({kind for kind in KINDS if (kind, stage, j) in found}, stage, j, rank)


def _check_ranks(schedule):
    ranks, m = len(schedule.ranks), schedule.micro_batches
    if not isinstance(m, int) or m < 1:
        raise ScheduleError(f"micro_batches={m!r}: expected an integer of at least 1")
    for stage, rank in enumerate(schedule.rank_of):
        if rank not in range(ranks):
            raise ScheduleError(f"stage {stage} is on rank {rank!r}: expected one of 0 to {ranks - 1}")
    for rank in range(ranks):
        if rank not in schedule.rank_of:
            raise ScheduleError(f"rank {rank} has no stage: expected at least one on each of {ranks} ranks")


def _check_instruction(schedule, rank, each):
    kind, stage, j = each
    if kind not in KINDS:
        raise ScheduleError(f"rank {rank} has an instruction of kind {kind!r}: expected one of {', '.join(KINDS)}")
    if stage not in range(schedule.stages):
        raise ScheduleError(f"rank {rank} has {each}: expected a stage of 0 to {schedule.stages - 1}")
    if j not in range(schedule.micro_batches):
        raise ScheduleError(f"rank {rank} has {each}: expected a micro-batch of 0 to {schedule.micro_batches - 1}")
    if schedule.rank_of[stage] != rank:
        raise ScheduleError(f"rank {rank} has {each}: stage {stage} is on rank {schedule.rank_of[stage]}")


def _check_kinds(kinds, stage, j, rank):
    """Raise unless there is an F and either a FULL, or a B and a W."""
    if BACKWARD in kinds and kinds & {INPUT, WEIGHT}:
        extra = Instruction(min(kinds & {INPUT, WEIGHT}), stage, j)
        raise ScheduleError(f"rank {rank} has {extra}, and FULL of the same: expected B and W, or FULL alone")
    for kind in (FORWARD,) if BACKWARD in kinds else (FORWARD, INPUT, WEIGHT):
        if kind not in kinds:
            instead = "" if kind == FORWARD or kinds & {INPUT, WEIGHT} else " (or its FULL)"
            raise ScheduleError(f"rank {rank} lacks {Instruction(kind, stage, j)}{instead}: expected once")


def check_own_order(schedule):
    """Raise ScheduleError unless each rank has F before B before W of one stage and micro-batch."""
    for rank, order in enumerate(schedule.ranks):
        place = {each: i for i, each in enumerate(order)}
        for i, each in enumerate(order):
            earlier = _before_on_this_rank(each)
            if earlier and place[earlier] > i:
                raise ScheduleError(f"rank {rank} has {each} in place {i}, and it waits for {earlier}, in place "
                                    f"{place[earlier]} of the same rank: expected F before B before W")


def _before_on_this_rank(each):
    """Return what has to precede an instruction in its rank's list; None for a forward."""
    kind, stage, j = each
    return None if kind == FORWARD else Instruction(INPUT if kind == WEIGHT else FORWARD, stage, j)


def event(each):
    """Return what an instruction brings about, as (kind, stage, micro-batch): a FULL does what a B does."""
    return (INPUT, *each[1:]) if each[0] == BACKWARD else each


def waits_for(each, stages):
    """Return the event of another stage that an instruction waits for, or None."""
    kind, stage, j = each
    if kind == FORWARD:
        return (FORWARD, stage - 1, j) if stage else None
    return None if kind == WEIGHT or stage + 1 == stages else (INPUT, stage + 1, j)


def executed(schedule):
    """Yield (rank, instruction, its event, the event that it waits for or None) in an order in which all can run, each
    rank in its own order, which is right by itself (`check_own_order`). DeadlockError when no rank can go on and some
    are not at their end."""
    stages, at, done, waiting = schedule.stages, [0] * len(schedule.ranks), set(), {}
    ready = list(range(len(schedule.ranks)))
    while ready:
        rank = ready.pop()
        order = schedule.ranks[rank]
        for i in range(at[rank], len(order)):
            needs, brought = waits_for(order[i], stages), event(order[i])
            if needs and needs not in done:  # no clock: whether it can run does not depend on costs
                waiting[needs] = rank  # only one instruction waits for an event
                at[rank] = i
                break
            yield rank, order[i], brought, needs
            done.add(brought)
            if brought in waiting:
                ready.append(waiting.pop(brought))  # that rank stopped at this event, and can go on
    if waiting:
        raise _deadlock(schedule, at, {rank: needs for needs, rank in waiting.items()})


def _deadlock(schedule, at, waiting):
    """Return the error for ranks that are at place `at` and wait for the events `waiting`: follow who waits for whom
    until the circle closes."""
    path, rank = {}, min(waiting)
    while rank not in path:
        kind, stage, j = waiting[rank]
        on_rank = schedule.rank_of[stage]
        needs = next(each for each in schedule.ranks[on_rank] if event(each) == (kind, stage, j))
        path[rank] = Blocked(rank, schedule.ranks[rank][at[rank]], needs, on_rank)
        rank = on_rank
    ranks = list(path)
    return DeadlockError(schedule.name, tuple(path[r] for r in ranks[ranks.index(rank):]))


def in_flight(order):
    """Return the InFlight of a rank's list. A count does not depend on what anything costs: only on the order."""
    held, most = Counter(), Counter()
    changes = {FORWARD: (("peak", 1), ("before_backward", 1)),
               BACKWARD: (("peak", -1), ("before_backward", -1)),
               INPUT: (("before_backward", -1), ("before_weight", 1)),
               WEIGHT: (("peak", -1), ("before_weight", -1))}
    for kind, *_ in order:
        for name, change in changes[kind]:
            held[name] += change
            most[name] = max(most[name], held[name])
    return InFlight(*(most[name] for name in InFlight._fields))
