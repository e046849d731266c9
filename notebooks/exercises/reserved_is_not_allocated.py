"""Exercises of the page *Reserved is not allocated*."""

import random

from refimpl.allocator import CachingAllocator, record
from refimpl.allocator.settings import MIB
from refimpl.common.allocations import Maker

from . import exercise


@exercise("bytes", int)
def first(predict):
    """Grade `predict(sizes)`: the bytes that PyTorch reserves for tensors of these sizes, made in order."""
    dice = random.Random(0)
    cases = [[1], [MIB, MIB, 1], [3 * MIB] * 4, [9 * MIB, 11 * MIB], [5 * MIB, 14 * MIB + 1, MIB // 2],
             [10 * MIB, 12 * MIB + 512], [int(2 ** dice.uniform(0, 25)) for _ in range(60)]]
    for sizes in cases:
        allocator = CachingAllocator()
        for nbytes in sizes:
            allocator.allocate(nbytes)
        said = predict(list(sizes))
        if said != allocator.reserved:
            shown = f"{sizes}" if len(sizes) < 6 else f"{len(sizes)} sizes, {sizes[:3]} …"
            return f"{shown}: you say {said!r}, {allocator.reserved:,} bytes are reserved"
    return None


@exercise("what is computed", list)
def second(release):
    """Grade `release(blocks, i)`: a segment [(size, free), …] after block i was freed and has joined its neighbours."""
    for text, i, right in (
            ("2f 4 2f", 1, "8f"), ("2 4 2", 1, "2 4f 2"), ("2 4 2f 6", 1, "2 6f 6"), ("2f 4 2 6f", 1, "6f 2 6f"),
            ("4", 0, "4f"), ("4 2", 1, "4 2f"), ("4f 2", 1, "6f"), ("4 2f", 0, "6f"),
            ("1f 1 1f 1 1f", 3, "1f 1 3f")):
        given, expected = (_blocks(each) for each in (text, right))
        said = release(list(given), i)
        if list(map(tuple, said)) != expected:
            return f"block {i} of {given} is freed: you say {said}, expected {expected}"
        if sum(size for size, _ in said) != sum(size for size, _ in given):
            return f"block {i} of {given} is freed: bytes were lost"
    return None


def _blocks(text):
    return [(int(each.removesuffix("f")) * MIB, each.endswith("f")) for each in text.split()]


@exercise("what is computed", (int, int))
def third(lost):
    """Grade `lost(snapshot)`: (bytes lost within live blocks, bytes of free blocks) of a Snapshot."""
    for seed, settings in ((0, ""), (1, "expandable_segments:True"), (2, "roundup_power2_divisions:4")):
        dice, maker, live = random.Random(seed), Maker(), []
        for _ in range(300):
            if live and dice.random() < 0.45:
                maker.free(live.pop(dice.randrange(len(live))))
            else:
                live.append(maker.alloc(int(2 ** dice.uniform(0, 24))))
        snapshot = record(maker.trace(), settings=settings)
        allocated, requested = (sum(segment[name] for segment in snapshot.segments)
                                for name in ("allocated_size", "requested_size"))
        right = allocated - requested, snapshot.reserved - allocated
        said = lost(snapshot)
        if not isinstance(said, (tuple, list)) or len(said) != 2:
            return f"expected a pair, the bytes within live blocks and the bytes of free ones; you say {said!r}"
        for what, mine, expected in zip(("lost within live blocks", "in free blocks"), said, right, strict=True):
            if mine != expected:
                return f"settings {settings or 'default'}: you say {mine:,} bytes {what}, there are {expected:,}"
    return None
