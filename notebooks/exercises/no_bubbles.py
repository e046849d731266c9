"""Exercises of the page *No bubbles*."""

from refimpl.pipeline.instructions import Instruction, Schedule
from refimpl.pipeline.named_schedules import idle_time, schedule
from refimpl.pipeline.step_simulation import Costs, simulate
from refimpl.pipeline.validate import ScheduleError, validate

from . import exercise

HINTS = {
    "first": [
        "With 1F1B rank 0 idles (p - 1)(F + B + W), and holds p activations.",
        "ZB-H1 has its Ws where 1F1B waits. A hop from rank to rank costs F + B, and one W of rank 0 fills a part.",
        "It idles (p - 1)(F + B - W). It holds no more than 1F1B."],
    "second": [
        "ZB-H1 has p - 1 - r forwards before rank r's first F, B pair, and a W comes r Bs late. Double both numbers.",
        "For each micro-batch j: the next F if there is one, B of j, and once more than 2r Bs wait for their W, the "
        "oldest W.",
        "Begin with min(2(p - 1 - r), m) forwards. End with the Ws that still wait."],
    "third": [
        "Go through the list, add what each instruction changes, and keep the largest sum.",
        "F adds whole[s]. FULL takes whole[s] away, W takes kept[s] away.",
        "B adds kept[s] - whole[s]. That can be more than 0."]}


@exercise("idle time and activations", (float, int))
def first(predict):
    """Grade `predict(ranks, micro_batches, F, B, W)`, which returns (idle time of rank 0, the most activations that it
    holds at once) of ZB-H1, for W no longer than F and at least as many micro-batches as ranks."""
    for case in ((2, 4, 1, 1, 1), (4, 8, 2, 3, 1), (8, 32, 4, 5, 3), (6, 6, 3, 3, 3), (5, 12, 7, 2, 3)):
        ranks, micro_batches, *costs = case
        said, built = predict(*case), schedule("zb-h1", ranks, micro_batches)
        read = simulate(built, Costs(*costs)).idle[0], validate(built)[0].peak
        for what, mine, right in zip(("idles", "holds"), said, read, strict=True):
            if not abs(mine - right) < 1e-6:
                return (f"{ranks} ranks, {micro_batches} micro-batches, F, B, W = {costs}: you say {mine}, rank 0 "
                        f"{what} {right}")
    return None


def _built(orders, ranks, micro_batches):
    """A Schedule of one stage on each rank, from plain tuples."""
    lists = tuple(tuple(Instruction(*each) for each in order) for order in orders)
    return Schedule("yours", lists, tuple(range(ranks)), micro_batches)


@exercise("what can run, idle time and activations", [[(str, int, int)]])
def second(orders):
    """Grade `orders(ranks, micro_batches)`, which returns ZB-H2: for each rank a list of (kind, rank, micro-batch),
    kinds "F", "B" and "W"."""
    for ranks, micro_batches in ((2, 4), (4, 8), (3, 5), (4, 9), (8, 16)):
        where, given = f"{ranks} ranks, {micro_batches} micro-batches", orders(ranks, micro_batches)
        if len(given) != ranks:
            return f"{where}: expected {ranks} lists, you give {len(given)}"
        if other := {kind for order in given for kind, *_ in order} - {"F", "B", "W"}:
            return f"{where}: expected kinds F, B and W, you give {', '.join(sorted(other))}, too"
        built = _built(given, ranks, micro_batches)
        try:
            counts = validate(built)
        except ScheduleError as error:
            return f"{where}: {error}"
        for costs in ((1, 1, 1), (4, 5, 3)):
            times = simulate(built, Costs(*costs)).idle
            for rank, read in enumerate(times):
                right = idle_time("zb-h2", ranks, *costs, rank=rank)
                if read > right:
                    return (f"{where}, F, B, W = {costs}: it can run, but rank {rank} idles {read:g}; {right:g} is "
                            "enough")
        for rank, count in enumerate(counts):
            if count.peak > 2 * ranks - 1:
                return (f"{where}: idle time is right, but rank {rank} holds {count.peak} activations; "
                        f"{2 * ranks - 1} are enough")
    return None


@exercise("bytes", int)
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
