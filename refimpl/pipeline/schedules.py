"""Schedules whose backward is whole: GPipe, 1F1B, and 1F1B with several stages on each rank.

Each rank's list is written down, place by place. A list that is found by greed, each time the first instruction that
can run, leaves more idle time: a rank must sometimes hold a forward back so that a backward comes earlier.
"""

from .instructions import BACKWARD, FORWARD, Instruction, Schedule


def gpipe(ranks, micro_batches):
    """Return the Schedule in which a rank does all forwards, then all backwards. Any number of micro-batches.

    Huang et al. 2019, "GPipe", section 2.3.
    """
    check_sizes(ranks, micro_batches)
    return Schedule("gpipe", tuple(tuple(forwards(r, micro_batches) + backwards(r, micro_batches))
                                   for r in range(ranks)), tuple(range(ranks)), micro_batches)


def one_forward_one_backward(ranks, micro_batches, in_flight=None):
    """Return the 1F1B Schedule: rank r does p − 1 − r forwards, then one forward and one backward in turn.

    So it never holds more than p − r micro-batches; or at most `in_flight`, and waits longer. Any number of
    micro-batches. Narayanan et al. 2019, "PipeDream", section 3.2; with one set of weights: Narayanan et al. 2021,
    "Efficient large-scale language model training", section 2.2.1.
    """
    check_sizes(ranks, micro_batches)
    orders = [alternate(forwards(r, micro_batches), backwards(r, micro_batches),
                        min(ranks - r, in_flight or ranks) - 1) for r in range(ranks)]
    return Schedule("1f1b", tuple(map(tuple, orders)), tuple(range(ranks)), micro_batches)


def interleaved(ranks, micro_batches, chunks):
    """Return the 1F1B Schedule in which rank r has the stages r, r + p, r + 2p, …: `chunks` of them, v.

    Micro-batches go in groups of p: a group through the first stage of a rank, then through its second, and so on.
    Rank r does 2(p − 1 − r) + (v − 1)p forwards first. A last group of fewer than p keeps the places that it would have
    in a whole one. Narayanan et al. 2021, section 2.2.2.
    """
    check_sizes(ranks, micro_batches, chunks)
    groups = -(-micro_batches // ranks) * ranks  # a last group is written whole, and cut
    orders = [alternate(*in_groups(ranks, r, groups, chunks), 2 * (ranks - 1 - r) + (chunks - 1) * ranks)
              for r in range(ranks)]
    return first_of(micro_batches, Schedule("interleaved", tuple(map(tuple, orders)), tuple(range(ranks)) * chunks,
                                            groups))


def forwards(stage, micro_batches):
    """Return the forwards of a stage, in order."""
    return [Instruction(FORWARD, stage, j) for j in range(micro_batches)]


def backwards(stage, micro_batches):
    """Return the whole backwards of a stage, in order."""
    return [Instruction(BACKWARD, stage, j) for j in range(micro_batches)]


def in_groups(ranks, rank, micro_batches, chunks):
    """Return (forwards, backwards) of all stages of a rank, in groups of p micro-batches; backward, the last stage is
    the first."""
    stages = range(rank, ranks * chunks, ranks)
    groups = [range(first, first + ranks) for first in range(0, micro_batches, ranks)]
    return ([Instruction(FORWARD, s, j) for group in groups for s in stages for j in group],
            [Instruction(BACKWARD, s, j) for group in groups for s in reversed(stages) for j in group])


def alternate(forwards, backwards, warmup):
    """Return one list: the first `warmup` forwards, then one forward and one backward in turn, then what is left."""
    order = forwards[:warmup]
    later = forwards[warmup:]
    for i, backward in enumerate(backwards):
        order += [*later[i : i + 1], backward]
    return order


def first_of(micro_batches, schedule):
    """Return a Schedule of the first micro-batches alone.

    It is as valid as the one given: an instruction waits only for others of its own micro-batch, and these stay in
    their order. So a schedule that is written for many micro-batches is one for few.
    """
    if micro_batches == schedule.micro_batches:
        return schedule
    return Schedule(schedule.name, tuple(tuple(each for each in order if each.micro_batch < micro_batches)
                                         for order in schedule.ranks), schedule.rank_of, micro_batches)


def check_sizes(ranks, micro_batches, chunks=1):
    """Raise ValueError unless all are integers above 0."""
    for name, value in (("ranks", ranks), ("micro_batches", micro_batches), ("chunks", chunks)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: expected an integer of at least 1")
