"""Right answers pass, wrong and unanswered ones do not."""

import math
from functools import partial

from exercises_kit import Answers, graded

from exercises import fragmentation as page

# --- first -----------------------------------------------------------------------------------------------------------


def fits(holes, size):
    room = [hole for hole in holes if hole[1] >= size]
    if not room:
        return None, None
    first = min(room)
    best = min(room, key=lambda hole: (hole[1], hole[0]))
    return first[0], best[0]


def fits_by_sorting(holes, size):
    by_place = sorted(holes)
    by_size = sorted(by_place, key=lambda hole: hole[1])  # stable: of equal holes the lower one stays first
    return [next((address for address, nbytes in each if nbytes >= size), None) for each in (by_place, by_size)]


def fits_in_one_pass(holes, size):
    first = best = least = None
    for address, nbytes in holes:
        if nbytes < size:
            continue
        if first is None or address < first:
            first = address
        if best is None or nbytes < least or (nbytes == least and address < best):
            best, least = address, nbytes
    return first, best


def worst_fit(holes, size):
    first, _ = fits(holes, size)
    return first, None if first is None else max(holes, key=lambda hole: hole[1])[0]


def as_listed(holes, size):
    return next((hole[0] for hole in holes if hole[1] >= size), None), fits(holes, size)[1]


def last_of_equals(holes, size):
    room = [hole for hole in holes if hole[1] >= size]
    return fits(holes, size)[0], min(room, key=lambda hole: (hole[1], -hole[0]))[0] if room else None


def first_listed_of_equals(holes, size):
    room = [hole for hole in holes if hole[1] >= size]
    return fits(holes, size)[0], min(room, key=lambda hole: hole[1])[0] if room else None


def falsy(holes, size):
    first, best = fits(holes, size)
    return first or None, best or None


def without_none(holes, size):
    first, best = fits(holes, size)
    return (-1, -1) if first is None else (first, best)


def whole_holes(holes, size):
    room = [hole for hole in holes if hole[1] >= size]
    return (min(room), min(room, key=lambda hole: hole[1])) if room else (None, None)


# --- second ----------------------------------------------------------------------------------------------------------


def least_capacity(runs, low, high):
    while high > 1.01 * low:
        middle = (low + high) // 2
        if runs(middle):
            high = middle
        else:
            low = middle
    return high


def to_the_byte(runs, low, high):
    if high - low <= 1:
        return high
    middle = low + (high - low) // 2
    return to_the_byte(runs, low, middle) if runs(middle) else to_the_byte(runs, middle, high)


def by_steps(runs, low, high):
    """Goes down in steps, each an eighth of the last."""
    step = (high - low) / 8
    while step > low / 800:
        while high - step > low and runs(high - step):
            high -= step
        step /= 2
    return high


def with_fault(runs, low, high, *, share=1.005, returns=lambda low, high: high, turned=False):
    while high > low * share:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle) is not turned else (middle, high)
    return returns(low, high)


def one_by_one(runs, low, high):
    while runs(high - high // 500):
        high -= high // 500
    return high


def from_below(runs, low, high):
    while not runs(low):
        low += high // 5000
    return low


# --- third -----------------------------------------------------------------------------------------------------------


def order(sizes, freed):
    stay = [i for i in range(len(sizes)) if i not in freed]
    return list(freed) + stay


def order_by_sorting(sizes, freed):
    return sorted(range(len(sizes)), key=lambda i: i in freed)


def in_the_middle(sizes, freed):
    stay = sorted(set(range(len(sizes))) - freed, key=sizes.__getitem__)
    half = len(stay) // 2
    return (*stay[:half], *sorted(freed, reverse=True), *stay[half:])


def alternately(sizes, freed):
    stay = [i for i in range(len(sizes)) if i not in freed]
    together = [each for pair in zip(freed, stay, strict=False) for each in pair]
    return together + [i for i in range(len(sizes)) if i not in together]


ANSWERS = {
    page.first: Answers(
        right=[fits, fits_by_sorting, fits_in_one_pass],
        wrong=[
            (worst_fit, "best fit gives 9216, you say 4096"),
            (as_listed, "first fit gives 512, you say 8192"),
            (last_of_equals, "holes [(0, 4096), (8192, 4096)]: best fit gives 0, you say 8192"),
            (first_listed_of_equals, "holes [(8192, 4096), (512, 4096)]: best fit gives 512, you say 8192"),
            (lambda holes, size: fits(holes, size + 1), "1024 bytes, holes [(512, 1024), (4096, 2048)]: first fit"),
            (lambda holes, size: fits(holes, size)[::-1], "first fit gives 4096, you say 9216"),
            (falsy, "holes [(0, 4096), (8192, 4096)]: first fit gives 0, you say None"),
            (without_none, "holes [(0, 512)]: first fit gives None, you say -1"),
            (whole_holes, "first fit gives 4096, you say (4096, 2048)"),
            (lambda holes, size: (holes.index((fits(holes, size)[0], 2048)), 0), "first fit gives 4096, you say 1"),
            (lambda holes, size: (min(holes)[0], min(holes, key=lambda hole: hole[1])[0]), "first fit gives 4096"),
            (lambda holes, size: 7, "expected a pair"),
            (lambda holes, size: fits(holes, size)[:1], "expected a pair")],
    ),
    page.second: Answers(
        right=[least_capacity, to_the_byte, by_steps],
        wrong=[
            (partial(with_fault, share=1.1), "it runs with 1 % less"),
            (partial(with_fault, share=1.05), "it runs with 1 % less"),
            (partial(with_fault, returns=lambda low, high: low), "bytes a request fails"),
            (partial(with_fault, turned=True), "it runs with 1 % less"),
            (partial(with_fault, share=1), "your function calls runs() more than 40 times: 8 are enough"),
            (lambda runs, low, high: low, "bytes a request fails"),
            (lambda runs, low, high: high, "it runs with 1 % less"),
            (lambda runs, low, high: (low + high) // 2, "bytes"),
            (lambda runs, low, high: least_capacity(runs, low, high) / 2**20, "bytes: expected from low, "),
            (lambda runs, low, high: math.nan, "you say nan bytes: expected from low"),
            (one_by_one, "your function calls runs() more than 40 times: 8 are enough"),
            (from_below, "your function calls runs() more than 40 times: 8 are enough")],
        same=("> → >=", "* → +"),
    ),
    page.third: Answers(
        right=[order, order_by_sorting, in_the_middle],
        wrong=[
            (lambda sizes, freed: list(range(len(sizes))), "bytes are free, and the largest hole has"),
            (lambda sizes, freed: sorted(range(len(sizes)), key=sizes.__getitem__), "bytes are free, and the largest"),
            (lambda sizes, freed: sorted(range(len(sizes)), key=lambda i: -sizes[i]), "and the largest hole has"),
            (alternately, "bytes are free, and the largest hole has"),
            (lambda sizes, freed: list(freed), "expected each index once"),
            (lambda sizes, freed: [sizes[i] for i in order(sizes, freed)], "expected each index once"),
            (lambda sizes, freed: [i + 1 for i in order(sizes, freed)], "expected each index once"),
            (lambda sizes, freed: set(freed), "expected a list")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
