"""What goes between ranks in a step: which message before and after which instruction, and when its memory is freed.

Stage s sends its output to stage s + 1, and the gradient of its input to stage s − 1. Both follow from the schedule
(`route`). Messages from one rank to another arrive in the order in which they were sent, so a rank receives them in
that order, too, whichever it needs first.

A message leaves only when its receiver is ready for it. So a receiver makes room for a message one instruction before
the one that needs it, and the message travels meanwhile. A sender keeps what it sends until it has left. When may it
wait for that, without waiting for ever? `route` runs through the schedule in unit times: F, B and W take 1, FULL takes
2. There a sender waits for no receiver whose instruction begins later than its own. So all waits point back in time,
and no circle of ranks waits for each other.
"""

from typing import NamedTuple

from .instructions import BACKWARD, FORWARD, INPUT, WEIGHT, Instruction
from .step_simulation import simulate


class Message(NamedTuple):
    """Names what a stage receives for a micro-batch. `kind`: "activation" or "gradient"."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self):
        return f"{self.kind} for stage {self.stage}, micro-batch {self.micro_batch}"


class Turn(NamedTuple):
    """Holds an instruction of a rank, and the messages around it.

    - `needs`: what it receives, or None; `source`: from which rank.
    - `makes`: what it sends, or None; `target`: to which rank. From the rank to itself, it is handed over.
    - `room`: (rank, message) to make room for before it, in order of receipt: what it and the next instruction need.
    - `left`: what was sent before and has left by now.
    """

    instruction: object
    needs: Message | None
    source: int | None
    makes: Message | None
    target: int | None
    room: tuple
    left: tuple


def received_by(schedule, instruction):
    """Return (what an instruction needs, the rank that makes it), or (None, None)."""
    kind, s, k = instruction
    if kind == FORWARD and s > 0:
        return Message("activation", s, k), schedule.rank_of[s - 1]
    if kind in (BACKWARD, INPUT) and s < schedule.stages - 1:
        return Message("gradient", s, k), schedule.rank_of[s + 1]
    return None, None


def sent_by(schedule, instruction):
    """Return (what an instruction makes, the rank that needs it), or (None, None)."""
    kind, s, k = instruction
    if kind == FORWARD and s < schedule.stages - 1:
        return Message("activation", s + 1, k), schedule.rank_of[s + 1]
    if kind in (BACKWARD, INPUT) and s > 0:
        return Message("gradient", s - 1, k), schedule.rank_of[s - 1]
    return None, None


def route(schedule, rank):
    """Return the Turns of a rank."""
    times = [[begin for _, begin, _ in timed] for timed in simulate(schedule).ranks]  # in unit time
    places = [_rooms(schedule, each) for each in range(len(schedule.ranks))]
    arrives = {message: times[r][i] for r, rooms in enumerate(places) for i, room in enumerate(rooms)
               for _, message in room}  # from this time on its receiver is ready
    left = [[] for _ in times[rank]]
    for i, instruction in enumerate(schedule.ranks[rank]):
        message, target = sent_by(schedule, instruction)
        # Not sooner than i + 2: the message travels while instruction i + 1 runs.
        later = [j for j in range(i + 2, len(left)) if times[rank][j] >= arrives.get(message, 0)]
        if message is not None and target != rank and later:
            left[later[0]].append(message)
    return [Turn(instruction, *received_by(schedule, instruction), *sent_by(schedule, instruction),
                 tuple(places[rank][i]), tuple(left[i])) for i, instruction in enumerate(schedule.ranks[rank])]


def route_forwards(schedule, rank):
    """Return the Turns of a rank for forwards alone: one micro-batch after the other, each through the stages in order.
    A rank makes room for a message when it needs it, and keeps what it sends until the end."""
    turns = []
    for k in range(schedule.micro_batches):
        for s in schedule.stages_of(rank):
            instruction = Instruction(FORWARD, s, k)
            message, source = received_by(schedule, instruction)
            room = () if source in (None, rank) else ((source, message),)
            turns.append(Turn(instruction, message, source, *sent_by(schedule, instruction), room, ()))
    return turns


def _rooms(schedule, rank):
    """Return, for each instruction of a rank, [(source, message)] to make room for before it."""
    order, streams, placed = schedule.ranks[rank], {}, {}
    for source, instructions in enumerate(schedule.ranks):
        if source != rank:
            products = [sent_by(schedule, each) for each in instructions]
            streams[source] = [message for message, target in products if message is not None and target == rank]
    rooms = [[] for _ in order]
    for i in range(len(order)):
        for instruction in order[i:i + 2]:  # one ahead, to travel meanwhile; more would hold memory for nothing
            message, source = received_by(schedule, instruction)
            if source not in (None, rank):
                # All that come before it: a stream cannot be received out of order.
                until = streams[source].index(message) + 1
                rooms[i] += [(source, each) for each in streams[source][placed.get(source, 0):until]]
                placed[source] = max(placed.get(source, 0), until)
    return rooms


def message_bytes(schedule, rank, nbytes, until_weight=False):
    """Predict the most bytes of messages that a rank holds at once in a step, from the second with the same shapes on.

    `nbytes`: of a stage's output for one micro-batch, or a list of one for each stage. Held are, in the order of a
    turn: what there is room for; what the instruction makes, until it has left; what arrived, an activation and later
    its gradient, until the end of the FULL or B, or with `until_weight` of the W: the stage's first leaf module keeps
    what it read until then, the last one the gradient of what it returned.
    """
    sizes = [nbytes] * schedule.stages if isinstance(nbytes, int) else list(nbytes)
    held, most = {}, 0
    for turn in route(schedule, rank):
        kind, stage, k = turn.instruction
        for _, message in turn.room:
            held[message] = _size(message, sizes)
        most = max(most, sum(held.values()))
        for message in turn.left:
            del held[message]
        if turn.target not in (None, rank):
            held[turn.makes] = _size(turn.makes, sizes)
        most = max(most, sum(held.values()))
        if kind == BACKWARD or kind == (WEIGHT if until_weight else INPUT):
            for what in ("activation", "gradient"):
                held.pop(Message(what, stage, k), None)
    return most


def _size(message, sizes):
    """Return a message's bytes: an activation is the output of the stage before, a gradient that of its own stage."""
    return sizes[message.stage - 1] if message.kind == "activation" else sizes[message.stage]


def message_traffic(schedule, rank, nbytes):
    """Predict the bytes of messages that a rank sends in a step: each output of its stages, and each gradient.

    `nbytes` as for `message_bytes`. Besides, `check_batch` sends ring_traffic("all_gather", 24 · ranks, ranks), and
    ties their all_reduce.
    """
    sizes = [nbytes] * schedule.stages if isinstance(nbytes, int) else list(nbytes)
    return sum(_size(turn.makes, sizes) for turn in route(schedule, rank) if turn.target not in (None, rank))
