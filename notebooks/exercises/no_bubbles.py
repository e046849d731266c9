"""Exercises of the page *No bubbles*."""

from refimpl.pipeline.instructions import Instruction, Schedule
from refimpl.pipeline.named_schedules import idle_time, schedule
from refimpl.pipeline.step_simulation import Costs, simulate
from refimpl.pipeline.validate import ScheduleError, validate

from . import exercise


@exercise("bytes", (float, int))
def first(predict):
    """Grade `predict(ranks, micro_batches, F, B, W)`, which returns (idle time of rank 0, the most activations that it
    holds at once) of ZB-H1, for W no longer than F and at least as many micro-batches as ranks."""
    for case in ((2, 4, 1, 1, 1), (4, 8, 2, 3, 1), (8, 32, 4, 5, 3), (6, 6, 3, 3, 3)):
        ranks, micro_batches, *costs = case
        said, built = predict(*case), schedule("zb-h1", ranks, micro_batches)
        if not isinstance(said, (tuple, list)) or len(said) != 2:
            return f"expected a pair, the idle time and the activations; you say {said!r}"
        read = simulate(built, Costs(*costs)).idle[0], validate(built)[0].peak
        for what, mine, right in zip(("idles", "holds"), said, read, strict=True):
            if mine != right:
                return (f"{ranks} ranks, {micro_batches} micro-batches, F, B, W = {costs}: you say {mine:g}, rank "
                        f"0 {what} {right:g}")
    return None


def _built(orders, ranks, micro_batches):
    """A Schedule of one stage on each rank, from plain tuples."""
    lists = tuple(tuple(Instruction(*each) for each in order) for order in orders)
    return Schedule("yours", lists, tuple(range(ranks)), micro_batches)


@exercise("what is computed", [list])
def second(orders):
    """Grade `orders(ranks, micro_batches)`, which returns ZB-H2: for each rank a list of (kind, rank, micro-batch),
    kinds "F", "B" and "W"."""
    for ranks, micro_batches in ((2, 4), (4, 8), (4, 16), (8, 16)):
        where, given = f"{ranks} ranks, {micro_batches} micro-batches", orders(ranks, micro_batches)
        if len(given) != ranks:
            return f"{where}: expected {ranks} lists, you give {len(given)}"
        built = _built(given, ranks, micro_batches)
        try:
            counts = validate(built)
        except ScheduleError as error:
            return f"{where}: {error}"
        for costs in ((1, 1, 1), (4, 5, 3)):
            read, right = max(simulate(built, Costs(*costs)).idle), idle_time("zb-h2", ranks, *costs)
            if read > right:
                return f"{where}, F, B, W = {costs}: it can run, but a rank idles {read:g}; {right:g} is enough"
        for rank, count in enumerate(counts):
            if count.peak > 2 * ranks - 1:
                return (f"{where}: idle time is right, but rank {rank} holds {count.peak} activations; "
                        f"{2 * ranks - 1} are enough")
    return None


@exercise("what is computed", int)
def third(peak):
    """Grade `peak(order, whole, kept)`, which returns the most bytes that a rank holds at once. `order`: its list of
    (kind, stage, micro-batch); an activation of stage s has `whole[s]` bytes from F on, and `kept[s]` from B on."""
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe-v", 2)):
        built = schedule(name, 4, 8)
        whole = [1000 + 300 * s for s in range(4 * chunks)]
        kept = [400 + 150 * s if s % 2 else 1300 + 310 * s for s in range(4 * chunks)]
        read = simulate(built, activation_bytes=whole, kept_bytes=kept).peak_bytes
        for rank, right in enumerate(read):
            said = peak([tuple(each) for each in built.ranks[rank]], list(whole), list(kept))
            if said != right:
                return f"rank {rank} of {name}: you say {said:,}, it holds {right:,} bytes at once"
    return None
