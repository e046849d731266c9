"""Right answers pass, wrong and unanswered ones do not; the graders' words are PyTorch's."""

import itertools
import math
import re
from functools import partial

from exercises_kit import Answers, graded

from exercises import a_gpu_without_a_gpu as page
from refimpl.rehearse import recorded_rehearsals as records

MIB = 2**20
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def between_steps(shapes, world):
    total = 0
    for rows, *rest in shapes:
        nbytes = 4 * -(-rows // world) * math.prod(rest)
        total += 4 * 512 * -(-nbytes // 512)
    return total


def in_slots(shapes, world):
    shards = [(math.ceil(shape[0] / world), *shape[1:]) for shape in shapes]
    return sum(512 * math.ceil(math.prod(shard) / 128) for shard in shards for _ in range(4))


def as_a_list(shapes, world):
    held = []
    for what in ("parameter", "gradient", "exp_avg", "exp_avg_sq"):
        for shape in shapes:
            elements = (shape[0] + world - 1) // world * math.prod(shape[1:])
            held.append((what, (4 * elements + 511) & ~511))
    return sum(nbytes for _, nbytes in held)


def with_fault(shapes, world, block=512, tensors=4, cut=True, up=True, e=4):
    total = 0
    for rows, *rest in shapes:
        n = world if cut else 1
        nbytes = e * (-(-rows // n) if up else rows // n) * math.prod(rest)
        total += tensors * block * -(-nbytes // block)
    return total


def by_the_allocator(shapes, world):
    allocator = page.CachingAllocator()
    for rows, *rest in shapes * 4:
        allocator.allocate(4 * math.prod(rest, start=-(-rows // world)))
    return allocator.allocated


def next_block(shapes, world):
    """A multiple of 512 gets one block too many."""
    return sum(4 * 512 * (4 * -(-rows // world) * math.prod(rest) // 512 + 1) for rows, *rest in shapes)


def in_one_buffer(shapes, world):
    """As ZeRO-3 does with all of a layer: one block for all shards of a kind."""
    return 4 * 512 * math.ceil(sum(4 * -(-rows // world) * math.prod(rest) for rows, *rest in shapes) / 512)


def by_elements(shapes, world):
    return sum(4 * 512 * math.ceil(4 * math.prod(shape) / world / 512) for shape in shapes)


def once_rounded(shapes, world):
    return 512 * math.ceil(with_fault(shapes, world, block=1) / 512)


def divisors(batch):
    return [batch // parts for parts in range(batch, 0, -1) if batch % parts == 0]


def largest(rehearse, batch):
    sizes = divisors(batch)
    low, high = 0, len(sizes)
    while high - low > 1:
        middle = (low + high) // 2
        fits = rehearse(sizes[middle])["out of memory"] is None
        low, high = (middle, high) if fits else (low, middle)
    return sizes[low]


def with_what_was_made(rehearse, batch, steps=2):
    sizes = divisors(batch)
    while len(sizes) > 1:
        half = len(sizes) // 2
        sizes = sizes[half:] if rehearse(sizes[half])["made"] >= steps else sizes[:half]
    return sizes[0]


def by_bisect(rehearse, batch):
    from bisect import bisect

    sizes = divisors(batch)
    return sizes[bisect(sizes[1:], 0, key=lambda micro: int(bool(rehearse(micro)["out of memory"])))]


def from_the_top(rehearse, batch):
    return next(m for m in reversed(divisors(batch)) if not rehearse(m)["out of memory"])


def any_number(rehearse, batch):
    low, high = 1, batch + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rehearse(middle)["out of memory"] else (middle, high)
    return low


def from_below(rehearse, batch):
    return max(itertools.takewhile(lambda micro: not rehearse(micro)["out of memory"], divisors(batch)))


def never_the_whole(rehearse, batch):
    """Takes for granted that the whole batch does not fit."""
    sizes = divisors(batch)
    low, high = 0, len(sizes) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if rehearse(sizes[middle])["out of memory"] else (middle, high)
    return sizes[low]


def the_first_that_fails(rehearse, batch):
    sizes = [*divisors(batch), 0]
    return sizes[sizes.index(largest(rehearse, batch)) + 1] or batch


def parts_instead(rehearse, batch):
    """How many micro-batches there are, not how large they are."""
    return batch // largest(rehearse, batch)


def halved(rehearse, batch):
    while rehearse(batch)["out of memory"] and batch > 1:
        batch //= 2
    return batch


def rehearsed_twice(rehearse, batch):
    return largest(lambda micro: [rehearse(micro) for _ in range(2)][-1], batch)


def powers_of_two(rehearse, batch):
    micro = 1
    while batch % (2 * micro) == 0 and not rehearse(2 * micro)["out of memory"]:
        micro *= 2
    return micro


def fragmented(message):
    units = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    found = re.findall(r"([0-9.]+) (bytes|KiB|MiB|GiB)", message)
    asked, _, free, _, _, unallocated = (float(number) * units[unit] for number, unit in found)
    return asked <= free + unallocated


def numbers(message, units=UNITS):
    found = re.findall(rf"([0-9.]+) ({'|'.join(units)})", message)
    return [float(number) * units[unit] for number, unit in found]


def of_numbers(found, **options):
    """Return an answer that asks `found` about the numbers of a message."""
    return lambda message: found(*numbers(message, **options))


def word_by_word(message):
    words = message.split()
    sizes = [float(number) * UNITS[unit.rstrip(".")] for number, unit in zip(words, words[1:], strict=False)
             if unit.rstrip(".") in UNITS]
    return sizes[2] + sizes[5] >= sizes[0]


def by_words(message):
    def after(words):
        number, unit = re.search(words + r" ([0-9.]+) (\w+)", message).groups()
        return float(number) * UNITS[unit]

    missing = after("allocate") - after("of which") - after("PyTorch, and")
    return missing <= 0


ANSWERS = {
    page.first: Answers(
        right=[between_steps, in_slots, as_a_list, by_the_allocator],
        wrong=[
            (partial(with_fault, block=1), "each tensor has a block of its own, a multiple of 512 bytes"),
            (once_rounded, "on 1 rank: you say 64,000, 65,536 bytes are allocated"),
            (in_one_buffer, "[(1,), (7, 7, 7)] on 8 ranks: you say 2,048, 4,096 bytes are allocated"),
            (partial(with_fault, tensors=3), "a parameter has a gradient and two moments beside it"),
            (partial(with_fault, tensors=1), "that is for parameters alone"),
            (by_elements, "[(10, 300)] on 4 ranks: you say 12,288, 16,384 bytes are allocated; whole rows are cut off"),
            (partial(with_fault, cut=False), "on 4 ranks: you say 49,152, 16,384 bytes are allocated; rank 0 has one "
                                             "shard of each tensor"),
            (partial(with_fault, up=False), "on 4 ranks: you say 10,240, 16,384 bytes are allocated; rank 0 has the "
                                            "rows divided by the world size, rounded up, not down"),
            (partial(with_fault, e=2), "[(8, 64)] on 1 rank: you say 4,096, 8,192 bytes are allocated"),
            (partial(with_fault, block=2**21), "[(8, 64)] on 1 rank: you say 8,388,608, 8,192 bytes are allocated"),
            (next_block, "[(8, 64)] on 1 rank: you say 10,240, 8,192 bytes are allocated"),
            (lambda shapes, world: between_steps(shapes[:1], world), "[(1000, 3), (1000,)] on 1 rank: you say 49,152"),
            (lambda shapes, world: "16 GiB", "expected a number, you return '16 GiB'")],
    ),
    page.second: Answers(
        right=[largest, with_what_was_made, by_bisect],
        wrong=[
            (lambda rehearse, batch: 1, "fits, too"),
            (lambda rehearse, batch: batch, "micro-batches of 60 are out of memory in step 1"),
            (partial(with_what_was_made, steps=1), "are out of memory in step 2"),
            (any_number, "which does not divide a batch of"),
            (powers_of_two, "fits, too"),
            (never_the_whole, "fits, too"),
            (the_first_that_fails, "are out of memory in step"),
            (parts_instead, "a batch of 60"),
            (halved, "you say 6 of a batch of 24; 8 fits, too"),
            (from_below, re.compile(r"right, but after \d+ rehearsals for \d+ divisors; \d are enough")),
            (rehearsed_twice, re.compile(r"right, but after \d rehearsals for \d+ divisors; \d are enough")),
            (from_the_top, re.compile(r"right, but after \d+ rehearsals for \d+ divisors; \d are enough"))],
    ),
    page.third: Answers(
        right=[fragmented, word_by_word, by_words],
        wrong=[
            (of_numbers(lambda asked, _, free, used, allocated, unallocated: asked <= unallocated), "You say False: "),
            (of_numbers(lambda asked, _, free, *others: asked <= free), "You say False: "),
            (of_numbers(lambda asked, _, free, used, allocated, unallocated: asked > unallocated),
             "You say False: 26 MiB"),
            (of_numbers(lambda asked, _, free, used, allocated, unallocated: asked < free + unallocated),
             "You say False: 512 MiB of the GPU and 512 MiB of PyTorch's are unused, 1024 MiB were asked for"),
            (of_numbers(lambda asked, capacity, free, used, allocated, _: asked <= capacity - used), "You say False: "),
            (of_numbers(lambda asked, capacity, free, used, allocated, _: asked <= capacity - allocated),
             "You say False: 2.5 MiB of the GPU and 2.5 MiB of PyTorch's are unused, 3 MiB were asked for"),
            (of_numbers(lambda asked, *others: asked <= others[1] + others[-1], units=dict.fromkeys(UNITS, 1)),
             "You say True: "),
            (of_numbers(lambda asked, *others: asked <= others[1] + others[-1],
                        units={"bytes": 1, "KiB": 1e3, "MiB": 1e6, "GiB": 1e9}),
             "You say True: 540 MiB of the GPU and 540 MiB of PyTorch's are unused, 1100 MiB were asked for"),
            (of_numbers(lambda asked, *others: asked <= others[1] + others[-1],
                        units={"MiB": 2**20, "GiB": 2**30}), "of which 0 bytes is free"),
            (lambda message: True, "You say True: 723 MiB of the GPU and 76 MiB of PyTorch's are unused, 1024 MiB were "
                                   "asked for"),
            (lambda message: False, "Tried to allocate 116.00 MiB. GPU 0 has a total capacity of 450.00 MiB"),
            (lambda message: "expandable_segments" in message, "You say True: "),
            (lambda message: 1 if fragmented(message) else 0, "expected True or False, you return 1"),
            (lambda message: "no", "expected True or False, you return 'no'")],
        same=("1 → 2",),  # of the unit of bytes: no byte is free, or thousands
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_the_grader_s_messages_are_pytorch_s():
    """The program of the page on fragmentation failed by PyTorch's own allocator: for its numbers the grader writes
    the same message."""
    failed = [each["out of memory"]["message"] for each in records._known().values() if each["out of memory"]]
    assert page.message(116 * MIB, 450 * MIB, 240 * MIB, 184 * MIB) in failed


def test_a_rehearsal_of_the_toy_fits_with_all_that_is_smaller():
    for capacity in (190, 210, 330):
        fits = [page.rehearsal(micro, capacity * MIB, 4)["out of memory"] is None for micro in (1, 4, 12, 48)]
        assert fits == sorted(fits, reverse=True) and len(set(fits)) == 2
