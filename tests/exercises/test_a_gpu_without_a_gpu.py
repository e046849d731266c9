"""Right answers pass, wrong and unanswered ones do not; the graders' words are PyTorch's."""

import math
import re
from functools import partial

from exercises_kit import Answers, graded

from exercises import a_gpu_without_a_gpu as page
from refimpl.rehearse import recorded_rehearsals as records

MIB = 2**20
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def between_steps(shapes, world, block=512, tensors=4, cut=True):
    total = 0
    for rows, *rest in shapes:
        nbytes = 4 * -(-rows // (world if cut else 1)) * math.prod(rest)
        total += tensors * block * -(-nbytes // block)
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


def by_elements(shapes, world):
    return sum(4 * 512 * math.ceil(4 * math.prod(shape) / world / 512) for shape in shapes)


def once_rounded(shapes, world):
    return 512 * math.ceil(between_steps(shapes, world, block=1) / 512)


def divisors(batch):
    return [micro for micro in range(1, batch + 1) if batch % micro == 0]


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


def powers_of_two(rehearse, batch):
    micro = 1
    while batch % (2 * micro) == 0 and not rehearse(2 * micro)["out of memory"]:
        micro *= 2
    return micro


def numbers(message, units=UNITS):
    found = re.findall(r"([0-9.]+) (bytes|KiB|MiB|GiB)", message)
    return [float(number) * units[unit] for number, unit in found]


def fragmented(message):
    asked, _, free, _, _, unallocated = numbers(message)
    return asked <= free + unallocated


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


def unallocated_alone(message):
    asked, *_, unallocated = numbers(message)
    return asked <= unallocated


def without_units(message):
    asked, _, free, _, _, unallocated = numbers(message, dict.fromkeys(UNITS, 1))
    return asked <= free + unallocated


ANSWERS = {
    page.first: Answers(
        right=[between_steps, in_slots, as_a_list],
        wrong=[
            (partial(between_steps, block=1), "each tensor has a block of its own, a multiple of 512 bytes"),
            (once_rounded, "bytes are allocated"),
            (partial(between_steps, tensors=3), "a parameter has a gradient and two moments beside it"),
            (partial(between_steps, tensors=1), "that is for parameters alone"),
            (by_elements, "on 4 ranks: you say"),
            (partial(between_steps, cut=False), "on 4 ranks: you say 49152, 16,384 bytes are allocated"),
            (lambda shapes, world: "16 GiB", "you say '16 GiB'")],
    ),
    page.second: Answers(
        right=[largest, with_what_was_made, by_bisect],
        wrong=[
            (lambda rehearse, batch: 1, "fits, too"),
            (lambda rehearse, batch: batch, "micro-batches of 60 are out of memory in step 1"),
            (partial(with_what_was_made, steps=1), "are out of memory in step 2"),
            (any_number, "which does not divide a batch of"),
            (powers_of_two, "fits, too"),
            (from_the_top, re.compile(r"right, but after \d rehearsals for \d+ divisors; \d are enough"))],
    ),
    page.third: Answers(
        right=[fragmented, word_by_word, by_words],
        wrong=[
            (unallocated_alone, "You say False: "),
            (without_units, "You say True: "),
            (lambda message: True, "You say True: "),
            (lambda message: "expandable_segments" in message, "You say True: "),
            (lambda message: numbers(message)[0] <= numbers(message)[2], "You say False: "),
            (lambda message: "no", "expected True or False, you say 'no'")],
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
