"""Schedules in the shape of a V: rank r has two stages, r on the way down and 2p − 1 − r on the way back up.

So rank 0 has the first stage and the last, and one rank's forward turns around on the last rank without a message. All
ranks hold the same number of activations: a stage that holds them long is paired with one that holds them briefly.

Both lists are written for 2p micro-batches or more. For fewer they are cut (`schedules.first_of`): they count their
own, and idle more.
"""

from collections import Counter

from .instructions import BACKWARD, FORWARD, INPUT, WEIGHT, Instruction, Schedule
from .schedules import check_sizes, first_of

DOWN, UP = 0, 1  # a rank's two stages


class _InstructionList:
    """Holds a rank's list while it is written: each kind takes the micro-batches of a stage in order."""

    def __init__(self, ranks, rank):
        self.stages = rank, 2 * ranks - 1 - rank
        self.order, self.done = [], Counter()  # (kind, way) -> micro-batches that have had it
        self.behind = []  # Bs whose W is still to come

    def add(self, kinds, way):
        """Append an instruction of each kind, of the stage on this way, for the next micro-batch."""
        for kind in kinds:
            counted = INPUT if kind == BACKWARD else kind  # FULL and B are both a stage's next backward
            each = Instruction(kind, self.stages[way], self.done[counted, way])
            self.done[counted, way] += 1
            self.order.append(each)
            if kind == INPUT:
                self.behind.append(each)

    def weight(self):
        """Append the W of the earliest B that has none yet."""
        self.order.append(Instruction(WEIGHT, *self.behind.pop(0)[1:]))


def _schedule(name, ranks, micro_batches, write):
    check_sizes(ranks, micro_batches)
    enough = max(micro_batches, 2 * ranks)  # the lists are written for as many, and cut
    rank_of = (*range(ranks), *reversed(range(ranks)))
    orders = []
    for r in range(ranks):
        order = _InstructionList(ranks, r)
        write(order, ranks, r, enough)
        orders.append(tuple(order.order))
    return first_of(micro_batches, Schedule(name, tuple(orders), rank_of, enough))


def zb_v(ranks, micro_batches):
    """Return ZB-V: no idle time where F = B = W, and no more activations than 1F1B has on its rank 0.

    Any number of micro-batches. Qi et al. 2024, "Pipeline parallelism with controllable memory", section 3.
    """
    return _schedule("zb-v", ranks, micro_batches, _write_zb_v)


def _write_zb_v(order, ranks, rank, micro_batches):
    each_way = (INPUT, WEIGHT)
    for _ in range(2 * (ranks - rank) - 1):  # until the first forward is back
        order.add((FORWARD,), DOWN)
    for _ in range(rank):
        order.add((FORWARD,), UP), order.add((FORWARD,), DOWN)
    for _ in range(ranks - rank):  # until the first gradient is back
        order.add((FORWARD, *each_way), UP)
    for i in range(micro_batches - ranks):
        if i <= micro_batches - 2 * ranks + rank:  # until the last one is in
            order.add((FORWARD,), DOWN)
        order.add(each_way, DOWN), order.add((FORWARD, *each_way), UP)
    for _ in range(rank):
        order.add((INPUT,), DOWN), order.add((INPUT,), UP)
    for _ in range(ranks - rank):
        order.add(each_way, DOWN)
    for way in (UP, DOWN):
        order.add((WEIGHT,) * (order.done[INPUT, way] - order.done[WEIGHT, way]), way)


def dualpipe_v(ranks, micro_batches):
    """Return DualPipe-V, in which a forward of one stage stands beside a whole backward of the other nearly always, so
    that messages of one hide under computation of the other. Only the first and last few backwards are cut in two.

    Any number of micro-batches. DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1, whose DualPipe needs
    the weights twice; cut in half as Qi et al. 2024 propose, and as PyTorch's `ScheduleDualPipeV` orders it.
    """
    return _schedule("dualpipe-v", ranks, micro_batches, _write_dualpipe_v)


def _write_dualpipe_v(order, ranks, rank, micro_batches):
    later, pairs = ranks - 1 - rank, rank + 1  # ranks below this one; and above it, with it
    order.add((FORWARD,) * (2 * later), DOWN)
    for _ in range(pairs):
        order.add((FORWARD,), DOWN), order.add((FORWARD,), UP)
    for _ in range(later):
        order.add((INPUT,), UP), order.weight(), order.add((FORWARD,), UP)
    for _ in range(micro_batches - 2 * ranks + pairs):
        order.add((FORWARD,), DOWN), order.add((BACKWARD,), UP)
        order.add((FORWARD,), UP), order.add((BACKWARD,), DOWN)
    for _ in range(later):
        order.add((BACKWARD,), UP), order.add((FORWARD,), UP), order.add((BACKWARD,), DOWN)
    for i in range(2 * pairs):  # the second half leaves its Ws for the end
        order.add((BACKWARD if i < pairs else INPUT,), UP if i % 2 == 0 else DOWN)
    for _ in range(later):
        order.weight(), order.add((INPUT,), DOWN)
    while order.behind:
        order.weight()
