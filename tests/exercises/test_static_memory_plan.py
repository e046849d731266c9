"""Right answers pass, wrong and unanswered ones do not."""

import pytest

from refimpl.allocator import paper_static
from refimpl.exercises import static_memory_plan as page


def closed(boxes):
    """Counts what ends at t as live at t."""
    return max(sum(n for begin, end, n in boxes if begin <= t <= end) for t in range(200))


def sums(boxes):
    return sum(n for *_, n in boxes)


def valid(boxes, offsets):
    return not paper_static.overlaps(boxes, offsets)


def too_strict(boxes, offsets):
    return valid([(begin, end + 1, n) for begin, end, n in boxes], offsets)


def by_time(boxes):
    order = sorted(range(len(boxes)), key=lambda b: boxes[b][0])
    offsets = [0] * len(boxes)
    for b, offset in zip(order, stacked([boxes[b] for b in order]), strict=True):
        offsets[b] = offset
    return offsets


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
    offsets, top = [], 0
    for *_, nbytes in boxes:
        offsets.append(top)
        top += nbytes
    return offsets


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, paper_static.lower_bound), (page.second, valid), (page.third, paper_static.greedy)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, closed, "what ends at 2 does not meet what begins at 2"),
    (page.first, sums, "bytes are live at most, you say"),
    (page.second, too_strict, "a plan that is valid: you say False"),
    (page.second, lambda boxes, offsets: True, "a plan that is not valid: you say True; boxes"),
    (page.second, lambda boxes, offsets: False, "a plan that is valid: you say False"),
    (page.third, by_time, "valid, but"),
    (page.third, apart, "times the lower bound"),
    (page.third, lambda boxes: [0] * len(boxes), "overlap"),
    (page.third, lambda boxes: [0], "expected an offset of 0 or more for each")])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
