"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

from exercises_kit import Answers, graded

from exercises import reserved_is_not_allocated as page

MIB = 2**20


def predict(sizes, rest=MIB, most=10 * MIB):
    left, reserved = {True: [], False: []}, 0
    for nbytes in sizes:
        size = max(512, -(-nbytes // 512) * 512)
        small = size <= MIB
        room = min((each for each in left[small] if each >= size), default=None)
        if room is None:
            room = 2 * MIB if small else 20 * MIB if size < most else -(-size // (2 * MIB)) * 2 * MIB
            reserved += room
        else:
            left[small].remove(room)
        if room - size > (0 if small else rest):
            left[small].append(room - size)
    return reserved


def release(blocks, i, *, before=True, after=True):
    first = i - 1 if before and i and blocks[i - 1][1] else i
    last = i + 1 if after and i + 1 < len(blocks) and blocks[i + 1][1] else i
    return [*blocks[:first], (sum(size for size, _ in blocks[first:last + 1]), True), *blocks[last + 1:]]


def lost(snapshot):
    internal = external = 0
    for segment in snapshot.segments:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                external += block["size"]
            else:
                internal += block["size"] - block["requested_size"]
    return internal, external


def all_of_it(snapshot):
    return lost(snapshot)[0], sum(block["size"] - block["requested_size"] for segment in snapshot.segments
                                  for block in segment["blocks"])


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (sum, "[1]: you say 1, 2,097,152 bytes are reserved"),
            (partial(predict, rest=10**12), "you say 83886080, 20,971,520 bytes are reserved"),
            (partial(predict, most=12 * MIB), "bytes are reserved")],
    ),
    page.second: Answers(
        right=[release],
        wrong=[
            (partial(release, before=False), "is freed: you say [(2097152, True), (6291456, True)], expected [(8388608, True)]"),
            (partial(release, after=False), "you say [(6291456, True), (2097152, True)], expected [(8388608, True)]"),
            (lambda blocks, i: [(size, free or j == i) for j, (size, free) in enumerate(blocks)], "expected")],
    ),
    page.third: Answers(
        right=[lost],
        wrong=[
            (all_of_it, "bytes in free blocks, there are"),
            (lambda snapshot: (0, lost(snapshot)[1]), "settings default: you say 0 bytes lost within live blocks"),
            (lambda snapshot: 5, "expected a pair")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
