"""Traces for the allocator's tests, and versions of it with another rule."""

import random

from refimpl.allocator import CachingAllocator, Settings
from refimpl.allocator.blocks import Pool
from refimpl.allocator.settings import MIB
from refimpl.allocator.trace import Maker


def random_trace(events, seed=0, *, live=200, streams=1, largest=26):
    """A trace of so many events: about `live` blocks of 64 bytes to 2^largest, each on one of some streams."""
    dice, found, held = random.Random(seed), Maker(), []
    for i in range(events):
        if held and dice.random() < len(held) / live:
            found.free(held.pop(dice.randrange(len(held))), i * 1000)
        else:
            kind = dice.choice(["activations", "gradients"])
            held.append(found.alloc(int(2 ** dice.uniform(6, largest)), kind, f"op {i % 7}", i * 1000,
                                    dice.randrange(streams)))
    return found.trace()


def mutants():
    """Versions of the caching allocator with another rule: {what it does: (class, method, function)}."""
    def splits_always(self, size, rest):
        return rest >= 512

    def splits_never(self, size, rest):
        return size <= MIB and rest >= 512

    def joins_nothing(self, block):
        block.pool.add(block)
        return block

    def keeps(self):
        return 0

    def worst_fit(self, stream, size):
        return iter([block for block in self.largest(stream) if block.size >= size])

    return {"splits always": (Settings, "splits", splits_always), "never": (Settings, "splits", splits_never),
            "joins nothing": (CachingAllocator, "join_and_keep", joins_nothing),
            "keeps segments": (CachingAllocator, "empty_cache", keeps), "worst fit": (Pool, "at_least", worst_fit)}
