"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

from exercises_kit import Answers, graded

from exercises import fragmentation as page


def fits(holes, size):
    room = [hole for hole in holes if hole[1] >= size]
    if not room:
        return None, None
    return min(room)[0], min(room, key=lambda hole: (hole[1], hole[0]))[0]


def worst_fit(holes, size):
    first, _ = fits(holes, size)
    return first, None if first is None else max(holes, key=lambda hole: hole[1])[0]


def as_listed(holes, size):
    return next((hole[0] for hole in holes if hole[1] >= size), None), fits(holes, size)[1]


def least_capacity(runs, low, high, share=1.005):
    while high > low * share:
        middle = (low + high) // 2
        low, high = (low, middle) if runs(middle) else (middle, high)
    return high


def one_by_one(runs, low, high):
    while runs(high - high // 500):
        high -= high // 500
        [runs(high) for _ in range(20)]
    return high


def order(sizes, freed):
    return [*freed, *(i for i in range(len(sizes)) if i not in freed)]


ANSWERS = {
    page.first: Answers(
        right=[fits],
        wrong=[
            (worst_fit, "best fit gives 9216, you say 4096"),
            (as_listed, "first fit gives 0, you say 8192"),
            (lambda holes, size: 7, "expected a pair")],
    ),
    page.second: Answers(
        right=[least_capacity],
        wrong=[
            (partial(least_capacity, share=1.1), "it runs with 1 % less"),
            (lambda runs, low, high: low, "bytes a request fails"),
            (lambda runs, low, high: high, "it runs with 1 % less"),
            (one_by_one, "replays; 8 are enough")],
    ),
    page.third: Answers(
        right=[order],
        wrong=[
            (lambda sizes, freed: list(range(len(sizes))), "bytes are free, and the largest hole has"),
            (lambda sizes, freed: list(freed), "expected each index once")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
