"""Exercises of the page *Fragmentation*."""

import random

from refimpl.allocator import OutOfMemory, replay
from refimpl.allocator.free_list import PlannedPool
from refimpl.allocator.settings import MIB
from refimpl.common.allocations import Maker

from . import exercise
from .asking import Complaint

HINTS = {
    "first": [
        "List the holes that have room: those of `size` bytes or more. If there are none, both answers are `None`.",
        "First fit takes the least address among them. Best fit takes the least size, and of equal sizes the least "
        "address.",
        "`min(room)` is first fit's hole, `min(room, key=lambda hole: (hole[1], hole[0]))` is best fit's."],
    "second": [
        "Try the capacity in the middle between `low` and `high`. What does the answer say about one half?",
        "If it runs, the middle is the new `high`, else it is the new `low`. Go on while `high` is more than 1 % above "
        "`low`.",
        "Return `high`: it was seen to run, or it is the one that was given."],
    "third": [
        "A pool takes addresses from low to high while nothing is freed: what is made in a row stands in a row.",
        "Holes that touch are joined. So make all that is freed in a row, before or after all that stays."]}


@exercise("the addresses")
def first(fits):
    """Grade `fits(holes, size)`: the addresses that first fit and best fit give a request, None where none fits."""
    dice = random.Random(0)
    cases = [([(1024, 512), (4096, 2048), (9216, 1536)], 1024), ([(512, 1024), (4096, 2048)], 1024),
             ([(0, 4096), (8192, 4096)], 512), ([(8192, 4096), (512, 4096)], 512), ([(8192, 512), (0, 4096)], 512),
             ([(0, 512)], 1024), ([], 512)]
    for count in range(1, 21):
        holes = [(i << 20, 512 * dice.randrange(1, 30)) for i in range(count)]
        cases.append((dice.sample(holes, count), 512 * dice.randrange(1, 30)))
    for holes, size in cases:
        room = [hole for hole in holes if hole[1] >= size]
        right = (min(room)[0], min(room, key=lambda hole: (hole[1], hole[0]))[0]) if room else (None, None)
        said = fits(list(holes), size)
        if not isinstance(said, (tuple, list)) or len(said) != 2:
            return f"expected a pair, the addresses of first fit and of best fit; you say {said!r}"
        for name, mine, expected in zip(("first fit", "best fit"), said, right, strict=True):
            if mine != expected:
                return f"{size} bytes, holes {holes}: {name} gives {expected}, you say {mine}"
    return None


def _growing(seed):
    dice, maker = random.Random(seed), Maker()
    for i in range(12):
        maker.free(maker.alloc((80 + dice.randrange(4, 12) * i) * MIB))
        maker.alloc(dice.randrange(20, 60) * MIB)
    return maker.trace()


REPLAYS = 40  # halving until one byte is left takes 30


@exercise("bytes and replays", int)
def second(least_capacity):
    """Grade `least_capacity(runs, low, high)`: the least capacity with which a trace runs, to 1 %, in few replays."""
    for seed in range(3):
        trace, tries = _growing(seed), []

        def replayed(capacity, trace=trace):
            return replay(trace, capacity=int(capacity)).failure is None

        def runs(capacity, tries=tries, replayed=replayed):
            tries.append(capacity)
            if len(tries) > REPLAYS:
                raise Complaint(f"your function calls runs() more than {REPLAYS} times: 8 are enough")
            return replayed(capacity)

        low, high = trace.peak, replay(trace).peak
        said = least_capacity(runs, low, high)
        if not low <= said <= high:
            return f"you say {said:,} bytes: expected from low, {low:,}, to high, {high:,}"
        if not replayed(said):
            return f"with {said:,} bytes a request fails"
        if replayed(said * 0.99):
            return f"you say {said:,} bytes; it runs with 1 % less"
    return None


@exercise("the order", [int])
def third(order):
    """Grade `order(sizes, freed)`: in which order tensors are made, so that what is freed becomes one hole."""
    dice = random.Random(1)
    for count, gone in ((4, 2), (10, 5), (10, 2), (20, 17), (20, 10)):
        sizes = [512 * dice.randrange(1, 64) for _ in range(count)]
        freed = set(dice.sample(range(count), gone))
        said = order(list(sizes), set(freed))
        if sorted(said) != list(range(count)):
            return f"{count} tensors: you say {said}, expected each index once"
        pool = PlannedPool(sum(sizes), "first_fit")
        blocks = {int(i): pool.allocate(sizes[int(i)]) for i in said}
        for i in sorted(freed):
            pool.free(blocks[i])
        large = sum(sizes[i] for i in freed)
        try:
            pool.allocate(large)
        except OutOfMemory:
            return (f"sizes {sizes}, freed {sorted(freed)}: {large:,} bytes are free, and the largest hole has "
                    f"{pool.largest_hole:,}")
    return None
