"""How long a step of a schedule takes, where ranks wait and what they hold: by arithmetic, no ranks needed.

    begin = max(end of the rank's instruction before, arrival of what it waits for)
    end = begin + cost
    arrival = end                                                      on the same rank
    arrival = max(end, its message before has left) + link.seconds     on another one
    idle of a rank = its last end − its first begin − its costs

A message is the output of a stage, or its gradient, which is as large. It leaves when its instruction has ended: a B's
before its W, a FULL's after its weights' gradients. A rank sends its messages one after the other, whomever they are
for, as over a `comm.Link` of real ranks. Costs may be any numbers; integers and fractions stay exact.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from .instructions import BACKWARD, FORWARD, INPUT, WEIGHT, Instruction, Schedule
from .validate import check_complete, check_own_order, executed, in_flight


class Costs(NamedTuple):
    """Says what a stage's F, B and W take: seconds, or any unit. A FULL takes `backward` + `weight`."""

    forward: float = 1
    backward: float = 1
    weight: float = 1


class Timed(NamedTuple):
    """Holds an Instruction with its begin and end, from the begin of the step."""

    instruction: Instruction
    begin: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """Holds a step in time, as `simulate` returns it.

    - `times[r]`: (begin, end) of each instruction of rank r, in order. `ranks[r]`: the same as Timed.
    - `step_time`: from the first begin to the last end of all ranks.
    - `idle[r]`: the time in which rank r does nothing between its own first begin and last end.
    - `in_flight[r]`: its activations at the worst moment, an InFlight.
    - `activation_bytes`, `kept_bytes`: of each stage, what one micro-batch holds from F on, and from B on.
    """

    schedule: Schedule
    times: tuple[list[tuple[float, float]], ...] = field(repr=False)
    activation_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...]

    @cached_property
    def ranks(self):
        return tuple(tuple(Timed(each, *time) for each, time in zip(order, times, strict=True))
                     for order, times in zip(self.schedule.ranks, self.times, strict=True))

    @cached_property
    def step_time(self):
        return max(times[-1][1] for times in self.times)

    @cached_property
    def idle(self):
        return tuple(times[-1][1] - times[0][0] - sum(end - begin for begin, end in times) for times in self.times)

    @cached_property
    def in_flight(self):
        return tuple(in_flight(order) for order in self.schedule.ranks)

    def activations_over_time(self, rank):
        """Return [(time, activations in flight)] of a rank: after each moment at which the number changes."""
        return self._changes(rank, (1,) * self.schedule.stages, (1,) * self.schedule.stages)

    def nbytes(self, rank):
        """Return [(time, bytes of activations)] of a rank: after each moment at which they change. An activation is
        there from the begin of its F on, until the end of what frees it."""
        return self._changes(rank, self.activation_bytes, self.kept_bytes)

    @cached_property
    def peak_bytes(self):
        """Return the most bytes of activations at once, of each rank."""
        return tuple(max(nbytes for _, nbytes in self.nbytes(rank)) for rank in range(len(self.times)))

    def _changes(self, rank, whole, kept):
        now, points = 0, [(0, 0)]
        for (kind, stage, _), (begin, end) in zip(self.schedule.ranks[rank], self.times[rank], strict=True):
            change = {FORWARD: whole[stage], BACKWARD: -whole[stage], INPUT: kept[stage] - whole[stage],
                      WEIGHT: -kept[stage]}[kind]
            if change:
                now += change
                points.append((begin if kind == FORWARD else end, now))
        return points


def simulate(schedule: Schedule, costs: Costs = Costs(), *, link: Any = None, message_bytes: float = 0,  # noqa: B008
             activation_bytes: Any = 1, kept_bytes: Any = None) -> Simulation:
    """Simulate a step of a Schedule. Returns a Simulation.

    `costs`: Costs of a stage, or a list of one for each stage. `link`: a `comm.Link` between any two ranks, each way
    for itself; without one, messages take no time. `message_bytes`: of a stage's output for one micro-batch, which its
    gradient has, too. `activation_bytes`: what a stage keeps of one micro-batch for its backward. `kept_bytes`: what is
    left of that from B until W, by default all. Bytes are a number for all stages, or a list of one for each.
    ScheduleError, DeadlockError as `validate`; ValueError for costs or bytes below 0, or not of each stage.
    """
    check_complete(schedule)
    check_own_order(schedule)
    stages = schedule.stages
    costs = _of_each(costs, stages, "costs", Costs)
    sizes = _of_each(message_bytes, stages, "message_bytes")
    whole = _of_each(activation_bytes, stages, "activation_bytes")
    kept = whole if kept_bytes is None else _of_each(kept_bytes, stages, "kept_bytes")
    seconds = [{FORWARD: f, INPUT: b, WEIGHT: w, BACKWARD: b + w} for f, b, w in costs]
    wire = [link.seconds("send", nbytes, 2) if link else 0 for nbytes in sizes]
    rank_of, arrived = schedule.rank_of, {}
    clock, sending, times = [0] * len(schedule.ranks), [0] * len(schedule.ranks), tuple([] for _ in schedule.ranks)
    for rank, each, event, needs in executed(schedule):
        begin = max(clock[rank], arrived[needs]) if needs else clock[rank]  # `executed` has given what it needs before
        arrived[event] = clock[rank] = end = begin + seconds[each.stage][each.kind]
        times[rank].append((begin, end))
        to = _receiver(event, stages)
        if link and to is not None and rank_of[to] != rank:
            # The output of stage s and its gradient, which stage s + 1 sends, are one size.
            sending[rank] = arrived[event] = max(sending[rank], end) + wire[min(each.stage, to)]
    return Simulation(schedule, times, whole, kept)


def _receiver(event, stages):
    """Return the stage that waits for an event, or None."""
    kind, stage, _ = event
    if kind == FORWARD:
        return stage + 1 if stage + 1 < stages else None
    return stage - 1 if kind == INPUT and stage else None


def _of_each(given, stages, name, cls=None):
    """Return one value for each stage, from one for all or from as many."""
    many = isinstance(given, (list, tuple)) and not isinstance(given, Costs)
    values = tuple(given) if many else (given,) * stages
    if len(values) != stages:
        raise ValueError(f"{name} of {len(values)} stages: expected one for all, or a list of {stages}")
    values = tuple(cls(*value) for value in values) if cls else values
    for number in (number for value in values for number in (value if cls else [value])):
        if not number >= 0:
            raise ValueError(f"{name}={given!r}: expected numbers of at least 0")
    return values
