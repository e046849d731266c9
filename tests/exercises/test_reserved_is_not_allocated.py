"""Right answers pass, wrong and unanswered ones do not."""

import pytest

from refimpl.exercises import reserved_is_not_allocated as page

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


def never_split(sizes):
    return predict(sizes, rest=10**12)


def sum_of_sizes(sizes):
    return sum(sizes)


def another_constant(sizes):
    return predict(sizes, most=12 * MIB)


def release(blocks, i, sides=(1, 1)):
    first = i - 1 if sides[0] and i and blocks[i - 1][1] else i
    last = i + 1 if sides[1] and i + 1 < len(blocks) and blocks[i + 1][1] else i
    return [*blocks[:first], (sum(size for size, _ in blocks[first:last + 1]), True), *blocks[last + 1:]]


def after_alone(blocks, i):
    return release(blocks, i, (0, 1))


def before_alone(blocks, i):
    return release(blocks, i, (1, 0))


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


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, predict), (page.second, release), (page.third, lost)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, sum_of_sizes, "[1]: you say 1, 2,097,152 bytes are reserved"),
    (page.first, never_split, "you say 83886080, 20,971,520 bytes are reserved"),
    (page.first, another_constant, "bytes are reserved"),
    (page.second, after_alone, "is freed: you say [(2097152, True), (6291456, True)], expected [(8388608, True)]"),
    (page.second, before_alone, "you say [(6291456, True), (2097152, True)], expected [(8388608, True)]"),
    (page.second, lambda blocks, i: [(size, free or j == i) for j, (size, free) in enumerate(blocks)], "expected"),
    (page.third, all_of_it, "bytes in free blocks, there are"),
    (page.third, lambda snapshot: (0, lost(snapshot)[1]), "settings default: you say 0 bytes lost within live blocks"),
    (page.third, lambda snapshot: 5, "expected a pair")])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer) and "right, on" not in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
