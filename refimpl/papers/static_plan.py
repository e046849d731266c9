"""A static plan in one screen: if you know when each tensor lives, you can choose its address before it is made.

A training step makes the same tensors in the same order each time. A caching allocator sees one request after the
other, and leaves holes. A planner sees them all, as boxes in a plane: address upward, time to the right.

    address ^          a box is as high as its tensor has bytes, and as wide as the tensor lives. Its place on the time
            |  ┌───┐   axis is given; its offset is chosen, so that no two boxes overlap. The arena is one piece of
            |  └┬──┴─┐ memory, as large as the top of the highest box.
            └───┴────┴──> time

    lower bound   max over t of the bytes that are live at t: no plan needs less
    greedy        the largest boxes first, of equals the one that lives longest; each into the smallest gap between the
                  boxes that are placed and live at the same time, or on top of them

To find the best plan is NP-hard; on training steps greedy plans are within 2 % of the lower bound. Greedy by size:
Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020).
"""

from itertools import accumulate


def lifetimes(events):
    """List (begin, end, nbytes) of each tensor. Events in order: (name, nbytes) makes it, (name, None) frees it."""
    begins, boxes = {}, {}
    for t, (name, nbytes) in enumerate(events):
        if nbytes is not None:
            begins[name] = t
            boxes[name] = t, len(events), nbytes  # to the end, unless it is freed
        else:
            boxes[name] = begins[name], t, boxes[name][2]
    return list(boxes.values())


def lower_bound(boxes):
    """Return the most bytes that are live at once."""
    change = [0] * (max((end for _, end, _ in boxes), default=0) + 1)
    for begin, end, nbytes in boxes:
        change[begin] += nbytes
        change[end] -= nbytes
    return max(accumulate(change))


def greedy(boxes):
    """Return the offset of each box."""
    offsets, placed = [0] * len(boxes), []  # placed: (offset, top, begin, end)
    for b in sorted(range(len(boxes)), key=lambda b: (-boxes[b][2], boxes[b][0] - boxes[b][1], boxes[b][0])):
        begin, end, nbytes = boxes[b]
        smallest, top = None, 0
        for low, high, *life in sorted(placed):
            if life[0] < end and begin < life[1]:  # lives at the same time
                gap = low - top
                if gap >= nbytes and (smallest is None or gap < smallest[0]):
                    smallest = gap, top
                top = max(top, high)
        offsets[b] = top if smallest is None else smallest[1]
        placed.append((offsets[b], offsets[b] + nbytes, begin, end))
    return offsets


def arena(boxes, offsets):
    """Return the bytes that a plan needs."""
    return max((offset + nbytes for offset, (_, _, nbytes) in zip(offsets, boxes, strict=True)), default=0)


def overlaps(boxes, offsets):
    """List the pairs of boxes that live at the same time and share an address: of a plan, none."""
    found, every = [], list(zip(offsets, boxes, strict=True))
    for i, (low, (begin, end, nbytes)) in enumerate(every):
        for j, (other, (first, last, size)) in enumerate(every[:i]):
            if begin < last and first < end and low < other + size and other < low + nbytes:
                found.append((j, i))
    return found
