"""Exercises of the page *Reserved is not allocated*."""

import random

from refimpl.allocator import CachingAllocator, record
from refimpl.allocator.settings import MIB
from refimpl.common.allocations import Maker

from . import exercise

HINTS = {
    "first": [
        "Round each size up to a multiple of 512. Up to 1 MiB the pool is the small one, above it the large one.",
        "Keep a list of free rests for each pool. Take the smallest rest that has room, and put back what is left.",
        "If no rest has room, a segment is reserved: 2 MiB in the small pool. In the large pool it is 20 MiB below "
        "10 MiB, else the size rounded up to a multiple of 2 MiB."],
    "second": [
        "At most three blocks become one: block i, and the block at each side if that is free.",
        "Find the first and the last block of the joined one. Block 0 has nothing before it: `blocks[-1]` is no "
        "neighbour.",
        "Return `blocks[:first] + [(sum of the sizes, True)] + blocks[last + 1:]`."],
    "third": [
        "Go through the blocks of all segments, and look at the state of each.",
        'An "inactive" block is free: all of its size is external. A live block loses size − requested_size.']}

# (sizes in MiB, the rule of which a fault shows here)
RULES = (
    ((1 / MIB,), "the smallest segment is 2 MiB"),
    ((1,), "up to 1 MiB a request is small"),
    ((1 + 1 / MIB,), "above 1 MiB a request is large"),
    ((9,), "below 10 MiB a large segment is 20 MiB"),
    ((10 - 1 / 2048,), "below 10 MiB a large segment is 20 MiB"),
    ((10,), "from 10 MiB on, a segment is as large as its request, in multiples of 2 MiB"),
    ((12 + 1 / 2048,), "a segment's size is rounded up to a multiple of 2 MiB"),
    ((1, 1), "a rest that is as large as the request has room"),
    ((1 - 1 / MIB, 1 - 1 / MIB, 1 / MIB), "each size is rounded up to a multiple of 512 bytes"),
    ((3, 4, 5, 6), "what is left of a segment serves the next requests"),
    ((3, 0.5), "small requests have segments of their own"),
    ((9, 9, 2, 1), "a small request takes nothing from a large segment"),
    ((12 + 1 / 2048, 1.5), "what is left of a rounded segment serves other requests"),
    ((9, 14 + 1 / 2048, 1.5, 11), "the smallest rest that has room is taken, not the first"),
    ((9, 9, 9, 2, 11), "the smallest rest that has room is taken, not the last, nor the largest"),
    ((0.25, 1, 1, 0.875, 0.125, 0.75), "the smallest rest that has room is taken, in the small pool too"))


@exercise("bytes", int)
def first(predict):
    """Grade `predict(sizes)`: the bytes that PyTorch reserves for tensors of these sizes, made in order."""
    dice = random.Random(0)
    cases = [([int(size * MIB) for size in sizes], f": {rule}") for sizes, rule in RULES]
    cases += [([int(2 ** dice.uniform(0, 25)) for _ in range(count)], "") for count in (60, 200)]
    for sizes, rule in cases:
        allocator = CachingAllocator()
        for nbytes in sizes:
            allocator.allocate(nbytes)
        said = predict(list(sizes))
        if said != allocator.reserved:
            shown = f"{sizes}" if len(sizes) < 8 else f"{len(sizes)} sizes, {sizes[:3]} …"
            return f"{shown}: you say {said:,}, {allocator.reserved:,} bytes are reserved{rule}"
    return None


@exercise("the blocks", [(int, bool)])
def second(release):
    """Grade `release(blocks, i)`: a segment [(size, free), …] after block i was freed and has joined its neighbours."""
    for text, i, right, rule in (
            ("4", 0, "4f", "it has no neighbour"),
            ("1 2 4", 1, "1 2f 4", "its neighbours are live"),
            ("1f 2 4f", 1, "7f", "it joins both neighbours"),
            ("1f 2 4", 1, "3f 4", "it joins the block before it"),
            ("1 2 4f", 1, "1 6f", "it joins the block after it"),
            ("1 2 4f", 0, "1f 2 4f", "the last block is no neighbour of the first"),
            ("1f 2 4", 2, "1f 2 4f", "the first block is no neighbour of the last"),
            ("1f 2", 1, "3f", "it joins the block before it"),
            ("1 2f", 0, "3f", "it joins the block after it"),
            ("1f 2 4f 8 16f 32 64f", 3, "1f 2 28f 32 64f", "only neighbours join"),
            ("1 2 4 8 16 32", 2, "1 2 4f 8 16 32", "its neighbours are live")):
        given, expected = (_blocks(each) for each in (text, right))
        said = list(map(tuple, release(list(given), i)))
        if said != expected:
            return f"block {i} of {given} is freed: you say {said}, expected {expected}: {rule}"
    return None


def _blocks(text):
    return [(int(each.removesuffix("f")) * 512, each.endswith("f")) for each in text.split()]


@exercise("bytes", (int, int))
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
        for what, mine, expected in zip(("lost within live blocks", "in free blocks"), lost(snapshot), right,
                                        strict=True):
            if mine != expected:
                return f"settings {settings or 'default'}: you say {mine:,} bytes {what}, there are {expected:,}"
    return None
