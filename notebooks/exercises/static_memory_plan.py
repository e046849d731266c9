"""Exercises of the page *A static memory plan*."""

import random

from refimpl.papers import static_plan as paper_static

from . import exercise


def _boxes(seed, count=40, end=60):
    """Make boxes (begin, end, nbytes) of a step: some live long, most briefly."""
    dice, boxes = random.Random(seed), []
    for _ in range(count):
        begin = dice.randrange(end - 1)
        life = dice.randrange(1, 6) if dice.random() < 0.7 else dice.randrange(10, 40)
        boxes.append((begin, min(end, begin + life), 64 * dice.randrange(1, 33)))
    return boxes


@exercise("what is computed", int)
def first(lower_bound):
    """Grade `lower_bound(boxes)`: the most bytes that are live at once."""
    for boxes in ([(0, 2, 64), (2, 4, 128)], [(0, 3, 64), (2, 4, 128)], [(5, 9, 64)], *map(_boxes, range(5))):
        said, right = lower_bound(list(boxes)), paper_static.lower_bound(boxes)
        if said != right:
            what = "; what ends at 2 does not meet what begins at 2" if boxes[0][:2] == (0, 2) else ""
            shown = f"{boxes[:4]}{' …' * (len(boxes) > 4)}"
            return f"boxes {shown}: {right} bytes are live at most, you say {said}{what}"
    return None


@exercise("what is computed", bool)
def second(valid):
    """Grade `valid(boxes, offsets)`: whether no two boxes share an address at the same time."""
    for seed in range(12):
        boxes = _boxes(seed)
        offsets, dice = paper_static.greedy(boxes), random.Random(seed)
        if seed % 3:  # one box goes down by a little
            b = max(range(len(boxes)), key=lambda b: offsets[b] * (dice.random() + 0.1))
            offsets[b] -= 1
        wrong = paper_static.overlaps(boxes, offsets)
        said = valid(list(boxes), list(offsets))
        if said is not (not wrong):
            a, b = wrong[0] if wrong else (0, 1)
            return (f"a plan that is {'not valid' if wrong else 'valid'}: you say {said!r}" + (
                f"; boxes {boxes[a]} at {offsets[a]} and {boxes[b]} at {offsets[b]} overlap" if wrong else ""))
    touching = [(0, 2, 64), (2, 4, 64), (0, 4, 64)], [0, 0, 64]
    if valid(*touching) is not True:
        return f"boxes {touching[0]} at {touching[1]} only touch: that is valid"
    return None


@exercise("what is computed", [int])
def third(plan):
    """Grade `plan(boxes)`: offsets that need at most 2 % more than the lower bound, or than the greedy plan."""
    for seed in range(8):
        boxes = _boxes(seed, 120, 150)
        offsets = list(plan(list(boxes)))
        if len(offsets) != len(boxes) or any(offset != int(offset) or offset < 0 for offset in offsets):
            return f"{len(boxes)} boxes, you say {str(offsets)[:60]}: expected an offset of 0 or more for each"
        if wrong := paper_static.overlaps(boxes, offsets):
            a, b = wrong[0]
            return f"boxes {boxes[a]} at {offsets[a]} and {boxes[b]} at {offsets[b]} overlap"
        bound, needs = paper_static.lower_bound(boxes), paper_static.arena(boxes, offsets)
        enough = 1.02 * max(bound, paper_static.arena(boxes, paper_static.greedy(boxes)))
        if needs > enough:
            return (f"valid, but {needs / bound:.2f} times the lower bound; {enough / bound:.2f} is enough: which "
                    "boxes are hard to place later?")
    return None
