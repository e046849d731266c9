"""Right answers pass, wrong and unanswered ones do not."""

from itertools import accumulate

from exercises_kit import Answers, graded

from exercises import static_memory_plan as page
from refimpl.papers import static_plan as paper_static


def closed(boxes):
    """Counts what ends at t as live at t."""
    return max(sum(n for begin, end, n in boxes if begin <= t <= end) for t in range(200))


def valid(boxes, offsets):
    return not paper_static.overlaps(boxes, offsets)


def too_strict(boxes, offsets):
    return valid([(begin, end + 1, n) for begin, end, n in boxes], offsets)


def by_time(boxes):
    order = sorted(range(len(boxes)), key=lambda b: boxes[b][0])
    offsets = dict(zip(order, stacked([boxes[b] for b in order]), strict=True))
    return [offsets[b] for b in range(len(boxes))]


def stacked(boxes):
    """First fit in the order given."""
    offsets = []
    for begin, end, nbytes in boxes:
        there = sorted((o, o + n) for o, (b, e, n) in zip(offsets, boxes, strict=False) if b < end and begin < e)
        at = 0
        for low, high in there:
            if low - at >= nbytes:
                break
            at = max(at, high)
        offsets.append(at)
    return offsets


def apart(boxes):
    return [0, *accumulate(nbytes for *_, nbytes in boxes)][:-1]


ANSWERS = {
    page.first: Answers(
        right=[paper_static.lower_bound],
        wrong=[
            (closed, "what ends at 2 does not meet what begins at 2"),
            (lambda boxes: sum(n for *_, n in boxes), "bytes are live at most, you say")],
    ),
    page.second: Answers(
        right=[valid],
        wrong=[
            (too_strict, "a plan that is valid: you say False"),
            (lambda boxes, offsets: True, "a plan that is not valid: you say True; boxes"),
            (lambda boxes, offsets: False, "a plan that is valid: you say False")],
    ),
    page.third: Answers(
        right=[paper_static.greedy],
        wrong=[
            (by_time, "valid, but"),
            (apart, "times the lower bound"),
            (lambda boxes: [0] * len(boxes), "overlap"),
            (lambda boxes: [0], "expected an offset of 0 or more for each")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
