"""Exercises of the page *A static memory plan*."""

import math
import random

from refimpl.papers import static_plan as paper_static

from . import exercise

HINTS = {
    "first": [
        "What is live only grows where a box begins: so look at these times alone.",
        "A box (begin, end, nbytes) is live at t if begin ≤ t < end. Add up the bytes of all such boxes.",
        "Return the largest of these sums, over t in all begins."],
    "second": [
        "Two boxes overlap in time if each begins before the other ends. What is the same for addresses?",
        "Box a takes the addresses from offset to offset + nbytes, the end not included.",
        "A plan is valid if no pair of boxes overlaps in both. `itertools.combinations` lists the pairs."],
    "third": [
        "Place one box after the other. Of the boxes that are placed, only those of the same time are in its way.",
        "First fit: sort what is in the way by offset, go upward from 0, and stop at the first gap with room.",
        "Take the boxes in the order of their bytes, the largest first: small ones fit into gaps later."]}


def _boxes(seed, count=40, end=60):
    """Make boxes (begin, end, nbytes) of a step: some live long, most briefly."""
    dice, boxes = random.Random(seed), []
    for _ in range(count):
        begin = dice.randrange(end - 1)
        life = dice.randrange(1, 6) if dice.random() < 0.7 else dice.randrange(10, 40)
        boxes.append((begin, min(end, begin + life), 64 * dice.randrange(1, 33)))
    return boxes


@exercise("bytes", int)
def first(lower_bound):
    """Grade `lower_bound(boxes)`: the most bytes that are live at once."""
    for boxes in ([(0, 2, 64), (2, 4, 128)], [(0, 3, 64), (2, 4, 128)], [(5, 9, 64)], *map(_boxes, range(5))):
        said, right = lower_bound(list(boxes)), paper_static.lower_bound(boxes)
        if said != right:
            what = "; what ends at 2 does not meet what begins at 2" if boxes[0][:2] == (0, 2) else ""
            shown = f"{boxes[:4]}{' …' * (len(boxes) > 4)}"
            return f"boxes {shown}: {right} bytes are live at most, you say {said}{what}"
    return None


PLANS = (  # boxes, offsets, what they show
    ([(0, 2, 64), (2, 4, 64)], [0, 0], "one begins when the other has ended"),
    ([(2, 4, 64), (0, 2, 64)], [0, 0], "one begins when the other has ended"),
    ([(0, 4, 64), (0, 4, 32)], [0, 64], "one lies on top of the other"),
    ([(0, 4, 64), (0, 4, 32)], [32, 0], "one lies on top of the other"),
    ([(0, 4, 64), (0, 4, 64)], [0, 0], "both have the same addresses at the same time"),
    ([(0, 4, 64), (3, 9, 32)], [0, 63], "both are live at 3, and share the last byte of the first"),
    ([(3, 9, 32), (0, 4, 64)], [63, 0], "both are live at 3, and share the last byte of the second"),
    ([(2, 3, 256), (0, 9, 16)], [0, 64], "one is live all the time that the other is, at some of its addresses"),
    ([(0, 9, 16), (2, 3, 256)], [64, 0], "one is live all the time that the other is, at some of its addresses"),
    ([(0, 9, 64), (0, 9, 64), (0, 9, 64)], [0, 64, 0], "the first and the last share addresses"))


@exercise("plans", bool)
def second(valid):
    """Grade `valid(boxes, offsets)`: whether no two boxes share an address at the same time."""
    cases = [(boxes, offsets, f": {what}") for boxes, offsets, what in PLANS]
    for seed in range(12):
        boxes = _boxes(seed)
        offsets, dice = paper_static.greedy(boxes), random.Random(seed)
        if seed % 3:  # one box goes down by a little
            b = max(range(len(boxes)), key=lambda b: offsets[b] * (dice.random() + 0.1))
            offsets[b] -= 1
        cases.append((boxes, offsets, ""))
    for boxes, offsets, what in cases:
        wrong, said = paper_static.overlaps(boxes, offsets), valid(list(boxes), list(offsets))
        if said != (not wrong):
            shown = f"boxes {boxes} at {offsets}" if what else f"{len(boxes)} boxes"
            if wrong and not what:
                a, b = wrong[0]
                what = f": {boxes[a]} at {offsets[a]} and {boxes[b]} at {offsets[b]} overlap"
            return f"{shown}, a plan that is {'not valid' if wrong else 'valid'}: you say {said}{what}"
    return None


@exercise("the plan and its bytes", [int])
def third(plan):
    """Grade `plan(boxes)`: offsets that need at most 2 % more than the lower bound, or than the greedy plan."""
    for seed in range(8):
        boxes = _boxes(seed, 120, 150)
        offsets = plan(list(boxes))
        if len(offsets) != len(boxes) or not all(0 <= offset < math.inf and offset % 1 == 0 for offset in offsets):
            return f"{len(boxes)} boxes, you say {str(offsets)[:60]}: expected an offset of 0 or more for each"
        if wrong := paper_static.overlaps(boxes, offsets):
            a, b = wrong[0]
            return f"boxes {boxes[a]} at {offsets[a]} and {boxes[b]} at {offsets[b]} overlap"
        bound, needs = paper_static.lower_bound(boxes), paper_static.arena(boxes, offsets)
        enough = 1.02 * max(bound, paper_static.arena(boxes, paper_static.greedy(boxes)))
        if needs > enough:
            return (f"valid, but the plan needs {needs:,.0f} bytes, and {int(enough):,} are enough; the lower bound "
                    f"is {bound:,}: which boxes are hard to place later?")
    return None
