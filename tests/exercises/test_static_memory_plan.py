"""Right answers pass, wrong and unanswered ones do not."""

import math
from functools import partial
from itertools import accumulate, combinations

import torch
from exercises_kit import Answers, graded

from exercises import static_memory_plan as page
from refimpl.papers import static_plan as paper_static

# --- first -----------------------------------------------------------------------------------------------------------


def lower_bound(boxes):
    return max(sum(nbytes for begin, end, nbytes in boxes if begin <= t < end) for t, _, _ in boxes)


def lower_bound_by_events(boxes):
    events = sorted([(begin, nbytes) for begin, _, nbytes in boxes] + [(end, -nbytes) for _, end, nbytes in boxes])
    return max(accumulate(change for _, change in events))  # of equal times what ends comes first: it is below 0


def lower_bound_in_an_array(boxes):
    live = torch.zeros(max(end for _, end, _ in boxes), dtype=torch.long)
    for begin, end, nbytes in boxes:
        live[begin:end] += nbytes
    return live.max().item()


def live_at(boxes, times, seen=lambda begin, t, end: begin <= t < end):
    return max((sum(n for begin, end, n in boxes if seen(begin, t, end)) for t in times), default=0)


def begins_first(boxes):
    events = sorted([(begin, 0, n) for begin, _, n in boxes] + [(end, 1, -n) for _, end, n in boxes])
    return max(accumulate(change for *_, change in events))


# --- second ----------------------------------------------------------------------------------------------------------


def valid(boxes, offsets):
    for (a, low), (b, other) in combinations(zip(boxes, offsets, strict=True), 2):
        same_time = a[0] < b[1] and b[0] < a[1]
        same_addresses = low < other + b[2] and other < low + a[2]
        if same_time and same_addresses:
            return False
    return True


def valid_by_ranges(boxes, offsets):
    def meet(a, b):
        return max(a[0], b[0]) < min(a[1], b[1])

    taken = [((begin, end), (at, at + nbytes)) for (begin, end, nbytes), at in zip(boxes, offsets, strict=True)]
    return not any(meet(time, other) and meet(place, there)
                   for i, (time, place) in enumerate(taken) for other, there in taken[:i])


def valid_by_painting(boxes, offsets):
    least = min(offsets)
    top = max(at + nbytes for (_, _, nbytes), at in zip(boxes, offsets, strict=True))
    plane = torch.zeros(max(end for _, end, _ in boxes), top - least, dtype=torch.uint8)
    for (begin, end, nbytes), at in zip(boxes, offsets, strict=True):
        plane[begin:end, at - least : at - least + nbytes] += 1
    return plane.max().item() <= 1


def valid_at_each_time(boxes, offsets):
    for t, _, _ in boxes:
        live = sorted((at, at + box[2]) for box, at in zip(boxes, offsets, strict=True) if box[0] <= t < box[1])
        if any(top > at for (_, top), (at, _) in zip(live, live[1:], strict=False)):
            return False
    return True


def valid_with_fault(boxes, offsets, *, pairs=lambda found: combinations(found, 2),
                     time=lambda a, b: a[0] < b[1] and b[0] < a[1],
                     place=lambda a, b: a[0] < b[1] and b[0] < a[1], both=all):
    found = [((begin, end), (at, at + nbytes)) for (begin, end, nbytes), at in zip(boxes, offsets, strict=True)]
    return not any(both((time(a, b), place(here, there))) for (a, here), (b, there) in pairs(found))


def starts_within(a, b):
    return a[0] <= b[0] < a[1]


# --- third -----------------------------------------------------------------------------------------------------------


def plan(boxes):
    offsets = {}
    for b in sorted(range(len(boxes)), key=lambda b: boxes[b][2], reverse=True):  # the largest first
        begin, end, nbytes = boxes[b]
        in_the_way = sorted((offsets[o], offsets[o] + boxes[o][2]) for o in offsets
                            if begin < boxes[o][1] and boxes[o][0] < end)
        at = 0
        for low, high in in_the_way:
            if low - at >= nbytes:
                break
            at = max(at, high)
        offsets[b] = at
    return [offsets[b] for b in range(len(boxes))]


def plan_by_the_paper(boxes):
    return tuple(paper_static.greedy(boxes))


def plan_by_area(boxes):
    """First fit, in the order of bytes times lifetime, of several orders the one that needs least."""
    orders = [lambda n, life: -n * life, lambda n, life: (-n, -life), lambda n, life: (-n * life**0.5)]
    plans = [in_order(boxes, lambda b, key=key: key(b[2], b[1] - b[0])) for key in orders]
    return min(plans, key=lambda offsets: paper_static.arena(boxes, offsets))


def plan_by_painting(boxes):
    """The lowest place that is free all the time, in units of 64 bytes."""
    taken, offsets = torch.zeros(150, 2000, dtype=torch.bool), [0.0] * len(boxes)
    for b in sorted(range(len(boxes)), key=lambda b: (-boxes[b][2], boxes[b][0])):
        begin, end, units = boxes[b][0], boxes[b][1], boxes[b][2] // 64
        free = (~taken[begin:end].any(dim=0)).unfold(0, units, 1).all(dim=-1)
        at = free.int().argmax().item()
        taken[begin:end, at : at + units] = True
        offsets[b] = float(64 * at)
    return offsets


def in_order(boxes, key):
    order = sorted(range(len(boxes)), key=lambda b: key(boxes[b]))
    offsets = dict(zip(order, stacked([boxes[b] for b in order]), strict=True))
    return [offsets[b] for b in range(len(boxes))]


def stacked(boxes, life=lambda b, e, begin, end: b < end and begin < e):
    """First fit in the order given."""
    offsets = []
    for begin, end, nbytes in boxes:
        there = sorted((o, o + n) for o, (b, e, n) in zip(offsets, boxes, strict=False) if life(b, e, begin, end))
        at = 0
        for low, high in there:
            if low - at >= nbytes:
                break
            at = max(at, high)
        offsets.append(at)
    return offsets


def on_top(boxes):
    """The largest first, each on top of what is in its way: no gap is used."""
    offsets = {}
    for b in sorted(range(len(boxes)), key=lambda b: -boxes[b][2]):
        begin, end, _ = boxes[b]
        offsets[b] = max((offsets[o] + boxes[o][2] for o in offsets if begin < boxes[o][1] and boxes[o][0] < end),
                         default=0)
    return [offsets[b] for b in range(len(boxes))]


def apart(boxes):
    return [0, *accumulate(nbytes for *_, nbytes in boxes)][:-1]


def unsorted(boxes):
    """The offsets of the sorted boxes, in the order of these."""
    return stacked(sorted(boxes, key=lambda box: -box[2]))


fault = partial(partial, valid_with_fault)
ANSWERS = {
    page.first: Answers(
        right=[lower_bound, lower_bound_by_events, lower_bound_in_an_array],
        wrong=[
            (lambda boxes: live_at(boxes, range(200), lambda begin, t, end: begin <= t <= end),
             "128 bytes are live at most, you say 192; what ends at 2 does not meet what begins at 2"),
            (begins_first, "128 bytes are live at most, you say 192; what ends at 2 does not meet what begins at 2"),
            (lambda boxes: live_at(boxes, range(200), lambda begin, t, end: begin < t < end), "64), (2, 4, 128)]: 192"),
            (lambda boxes: live_at(boxes, range(len(boxes))), "boxes [(0, 2, 64), (2, 4, 128)]: 128"),
            (lambda boxes: live_at(boxes, [begin for begin, _, _ in boxes[:1]]), "(2, 4, 128)]: 128 bytes"),
            (lambda boxes: live_at(boxes, [end for _, end, _ in boxes]), "bytes are live at most, you say"),
            (lambda boxes: sum(n for *_, n in boxes), "128 bytes are live at most, you say 192"),
            (lambda boxes: max(n for *_, n in boxes), "192 bytes are live at most, you say 128"),
            (lambda boxes: paper_static.arena(boxes, paper_static.greedy(boxes)), "bytes are live at most, you say"),
            (lambda boxes: live_at([(b, e, 1) for b, e, _ in boxes], range(200)), "bytes are live at most, you say 1")],
    ),
    page.second: Answers(
        right=[valid, valid_by_ranges, valid_by_painting, valid_at_each_time],
        wrong=[
            (fault(time=lambda a, b: a[0] <= b[1] and b[0] <= a[1]),
             "a plan that is valid: you say False: one begins when the other has ended"),
            (fault(place=lambda a, b: a[0] <= b[1] and b[0] <= a[1]),
             "a plan that is valid: you say False: one lies on top of the other"),
            (fault(both=any), "a plan that is valid: you say False: one begins when the other has ended"),
            (fault(time=lambda a, b: True), "a plan that is valid: you say False: one begins when the other has ended"),
            (fault(place=lambda a, b: a[0] == b[0]), "a plan that is not valid: you say True: both are live at 3"),
            (fault(place=starts_within), "share the last byte of the second"),
            (fault(time=starts_within), "a plan that is not valid: you say True: both are live at 3"),
            (fault(time=lambda a, b: a == b), "a plan that is not valid: you say True: both are live at 3"),
            (fault(pairs=lambda found: zip(found, found[1:], strict=False)), "the first and the last share addresses"),
            (lambda boxes, offsets: bool(paper_static.overlaps(boxes, offsets)), "a plan that is valid: you say False"),
            (lambda boxes, offsets: paper_static.overlaps(boxes, offsets), "expected True or False, you return []"),
            (lambda boxes, offsets: len(set(offsets)) == len(offsets), "a plan that is valid: you say False"),
            (lambda boxes, offsets: True, "a plan that is not valid: you say True: both have the same addresses"),
            (lambda boxes, offsets: False, "a plan that is valid: you say False")],
    ),
    page.third: Answers(
        right=[plan, plan_by_the_paper, plan_by_area, plan_by_painting],
        wrong=[
            (lambda boxes: in_order(boxes, lambda box: box[0]), "valid, but the plan needs"),
            (lambda boxes: in_order(boxes, lambda box: box[2]), "valid, but the plan needs"),
            (stacked, "valid, but the plan needs"),
            (on_top, "valid, but the plan needs"),
            (apart, "valid, but the plan needs"),
            (unsorted, "overlap"),
            (lambda boxes: stacked(boxes, lambda b, e, begin, end: b <= begin < e), "overlap"),
            (lambda boxes: [at - 1 if at else 0 for at in plan(boxes)], "overlap"),
            (lambda boxes: [0] * len(boxes), "overlap"),
            (lambda boxes: [at - 64 for at in plan(boxes)], "expected an offset of 0 or more for each"),
            (lambda boxes: [at / 3 for at in plan(boxes)], "expected an offset of 0 or more for each"),
            (lambda boxes: [math.nan] * len(boxes), "expected an offset of 0 or more for each"),
            (lambda boxes: list(enumerate(plan(boxes))), "expected a number, you return (0, "),
            (lambda boxes: [0], "expected an offset of 0 or more for each")],
        same=("0 → 1", ">= → >", "at, high → high, at"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
