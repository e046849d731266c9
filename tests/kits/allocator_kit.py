"""Traces for the allocator's tests, and versions of it with another rule."""

import random

from refimpl.allocator import CachingAllocator, Settings
from refimpl.allocator import settings as constants
from refimpl.allocator.blocks import Pool
from refimpl.allocator.settings import MIB
from refimpl.common.allocations import Maker


def random_trace(events, seed=0, *, live=200, streams=1, largest=26):
    """A trace of so many events: about `live` blocks of 64 bytes to 2^largest, each on one of some streams."""
    dice, found, held = random.Random(seed), Maker(), []
    for i in range(events):
        if held and dice.random() < len(held) / live:
            found.free(held.pop(dice.randrange(len(held))), i * 1000)
        else:
            kind, nbytes = dice.choice(["activations", "gradients"]), int(2 ** dice.uniform(6, largest))
            held.append(found.alloc(nbytes, kind, f"op {i % 7}", i * 1000, dice.randrange(streams)))
    return found.trace()


def joins_nothing(self, block):
    block.pool.add(block)
    return block


OTHER_RULES = {  # of the caching allocator: {what it does: (where, name, what is there)}
    "splits always": (Settings, "splits", lambda self, size, rest: rest >= 512),
    "never": (Settings, "splits", lambda self, size, rest: size <= MIB and rest >= 512),
    "joins nothing": (CachingAllocator, "join_and_keep", joins_nothing),
    "keeps segments": (CachingAllocator, "empty_cache", lambda self: 0),
    "worst fit": (Pool, "at_least", lambda self, stream, size: iter([
        block for block in self.largest(stream) if block.size >= size]))}
OTHER_CONSTANTS = {name: (constants, name, value) for name, value in (
    ("BLOCK", 1024), ("SMALL", 2 * MIB), ("SMALL_SEGMENT", 4 * MIB), ("MIN_LARGE", 8 * MIB), ("ROUND_LARGE", MIB))}
