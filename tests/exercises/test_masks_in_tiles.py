"""Right answers pass, wrong and unanswered ones do not."""

import functools

from exercises_kit import Answers, graded

from exercises import masks_in_tiles as page


def band(a, b, T, S, left, right, *, shift=True, clipped=True, empty=True):
    at = S - T if shift else 0
    first = 0 if left is None else max(0, a + at - left)
    end = S if right is None else b + at + right
    end = min(S, end) if clipped else end
    return (first, end) if first < end or not empty else (0, 0)


def tiles_of(ends, size, *, anew=True, whole=False):
    if not anew:
        ends = ends[-1:]
    counts = [-(-(end - first) // size) for first, end in zip([0, *ends], ends, strict=False)]
    return sum(n * n if whole else n * (n + 1) // 2 for n in counts)


ANSWERS = {
    page.first: Answers(
        right=[band],
        wrong=[
            (functools.partial(band, shift=False), "4, 9 keys, left=None, right=0"),
            (functools.partial(band, clipped=False), "8, 8 keys, left=1, right=2"),
            (functools.partial(band, empty=False), "9, 4 keys, left=None, right=0"),
            (lambda a, b, T, S, left, right: (0, S), "expected (0, 1)")],
    ),
    page.second: Answers(
        right=[tiles_of],
        wrong=[
            (functools.partial(tiles_of, anew=False), "ends [300, 424, 1024], tiles of 128: 36, expected 22"),
            (functools.partial(tiles_of, whole=True), "ends [1024], tiles of 128: 64, expected 36"),
            (lambda ends, size: sum(-(-end // size) for end in ends), "ends [1024], tiles of 128: 8, expected 36")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
