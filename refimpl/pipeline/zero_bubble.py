"""Schedules with a backward in two parts: the gradient of the input, B, which the rank before waits for, and the
gradients of the weights, W, which nobody waits for. A W fills time in which a rank would wait.

All three are 1F1B with each backward cut in two and the Ws late. The later a rank's W, the longer its activations live:
the lists differ in how many forwards a rank is ahead, and in how many Ws it is behind.
"""

from .instructions import BACKWARD, INPUT, WEIGHT, Instruction, Schedule
from .schedules import alternate, backwards, check_sizes, first_of, forwards, in_groups


def zb_h1(ranks, micro_batches):
    """Return ZB-H1, which holds no more than rank 0 of 1F1B: p − 1 − r forwards ahead, r Ws behind.

    Any number of micro-batches. Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.1.1.
    """
    return _handcrafted("zb-h1", ranks, micro_batches, 1)


def zb_h2(ranks, micro_batches):
    """Return ZB-H2, without idle time where F = B = W: 2(p − 1 − r) forwards ahead, 2r Ws behind.

    Any number of micro-batches; it takes 2p − 1 of them to fill the pipeline. Qi et al. 2023, section 2.1.2.
    """
    return _handcrafted("zb-h2", ranks, micro_batches, 2)


def _handcrafted(name, ranks, micro_batches, step):
    """Each rank is `step` forwards less ahead than the rank before, and `step` Ws more behind."""
    check_sizes(ranks, micro_batches)
    orders = [alternate(forwards(r, micro_batches), backwards(r, micro_batches), step * (ranks - 1 - r))
              for r in range(ranks)]
    return Schedule(name, tuple(tuple(split(order, step * r)) for r, order in enumerate(orders)), tuple(range(ranks)),
                    micro_batches)


def interleaved_zero_bubble(ranks, micro_batches, chunks):
    """Return the interleaved schedule with late Ws, as PyTorch's `ScheduleInterleavedZeroBubble` orders it:
    (v − 1)p + p − 1 − r forwards ahead, r Ws behind, v = `chunks`.

    Stages and groups are those of `schedules.interleaved`. With v = 1 and whole groups it is ZB-H1.
    """
    check_sizes(ranks, micro_batches, chunks)
    groups = -(-micro_batches // ranks) * ranks
    orders = [alternate(*in_groups(ranks, r, groups, chunks), chunks * ranks - 1 - r) for r in range(ranks)]
    return first_of(micro_batches, Schedule("interleaved-zero-bubble",
                                            tuple(tuple(split(order, r)) for r, order in enumerate(orders)),
                                            tuple(range(ranks)) * chunks, groups))


def split(order, behind):
    """Return the list with each whole backward cut in two: its B in its place, its W after the `behind`-th B that
    follows; the Ws that are left stand at the end."""
    cut, waiting = [], []
    for each in order:
        if each.kind != BACKWARD:
            cut.append(each)
            continue
        cut.append(Instruction(INPUT, *each[1:]))
        waiting.append(Instruction(WEIGHT, *each[1:]))  # nobody waits for a W, so it may come late
        if len(waiting) > behind:
            cut.append(waiting.pop(0))
    return cut + waiting
