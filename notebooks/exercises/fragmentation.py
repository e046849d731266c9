"""Exercises of the page *Fragmentation*."""

import random

from refimpl.allocator import OutOfMemory, replay
from refimpl.allocator.free_list import PlannedPool
from refimpl.allocator.settings import MIB
from refimpl.common.allocations import Maker

from . import exercise


@exercise("what is computed", tuple)
def first(fits):
    """Grade `fits(holes, size)`: the addresses that first fit and best fit give a request, None where none fits."""
    dice = random.Random(0)
    cases = [([(0, 512), (4096, 2048), (9216, 1024)], 1024), ([(0, 4096), (8192, 4096)], 512), ([(0, 512)], 1024),
             ([(8192, 512), (0, 4096)], 512)]
    cases += [([(i << 20, 512 * dice.randrange(1, 30)) for i in range(20)], 512 * dice.randrange(1, 30))
              for _ in range(20)]
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


@exercise("what is computed", int)
def second(least_capacity):
    """Grade `least_capacity(runs, low, high)`: the least capacity with which a trace runs, to 1 %, in few replays."""
    for seed in range(3):
        trace, tries = _growing(seed), []

        def runs(capacity, trace=trace, tries=tries):
            tries.append(capacity)
            return replay(trace, capacity=int(capacity)).failure is None

        low, high = trace.peak, replay(trace).peak
        said, asked = least_capacity(runs, low, high), len(tries)
        if not runs(said):
            return f"with {said:,} bytes a request fails"
        if said > low * 1.01 and runs(said * 0.99):
            return f"you say {said:,} bytes; it runs with 1 % less"
        if asked > 40:
            return f"right, but after {asked} replays; 8 are enough"
    return None


@exercise("what is computed", [int])
def third(order):
    """Grade `order(sizes, freed)`: in which order tensors are made, so that what is freed becomes one hole."""
    dice = random.Random(1)
    for count in (4, 10, 20):
        sizes = [512 * dice.randrange(1, 64) for _ in range(count)]
        freed = set(dice.sample(range(count), count // 2))
        said = list(order(list(sizes), set(freed)))
        if sorted(said) != list(range(count)):
            return f"{count} tensors: you say {said}, expected each index once"
        pool = PlannedPool(sum(sizes), "first_fit")
        blocks = {i: pool.allocate(sizes[i]) for i in said}
        for i in sorted(freed):
            pool.free(blocks[i])
        large = sum(sizes[i] for i in freed)
        try:
            pool.allocate(large)
        except OutOfMemory:
            return (f"sizes {sizes}, freed {sorted(freed)}: {large:,} bytes are free, and the largest hole has "
                    f"{pool.largest_hole:,}")
    return None
