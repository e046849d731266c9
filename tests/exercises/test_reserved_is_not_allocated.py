"""Right answers pass, wrong and unanswered ones do not."""

from bisect import bisect_left, insort
from functools import partial
from itertools import groupby

from exercises_kit import Answers, graded

from exercises import reserved_is_not_allocated as page
from refimpl.papers.caching_allocator import CachingAllocator

MIB = 2**20

# --- first -----------------------------------------------------------------------------------------------------------


def predict(sizes):
    rests, reserved = {"small": [], "large": []}, 0
    for nbytes in sizes:
        size = -(-nbytes // 512) * 512
        pool = "small" if size <= MIB else "large"
        room = min((rest for rest in rests[pool] if rest >= size), default=None)
        if room is not None:
            rests[pool].remove(room)
        else:
            room = 2 * MIB if pool == "small" else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            reserved += room
        rests[pool].append(room - size)
    return reserved


def predict_by_bisection(sizes):
    small, large, segments = [], [], []
    for nbytes in sizes:
        size = (nbytes + 511) & ~511
        rests = small if size <= MIB else large
        at = bisect_left(rests, size)
        if at == len(rests):
            segments.append(2 * MIB if rests is small else 20 * MIB if size < 10 * MIB
                            else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB)
            insort(rests, segments[-1] - size)
        else:
            insort(rests, rests.pop(at) - size)
    return sum(segments)


def predict_by_the_paper(sizes):
    segments = []

    def malloc(nbytes):
        segments.append(nbytes)
        return 2**40 * len(segments)

    allocator = CachingAllocator(malloc, free=None)
    kept = [allocator.allocate(nbytes) for nbytes in sizes]
    return sum(segments) if kept else 0


def with_fault(sizes, *, block=512, small=MIB, small_segment=2 * MIB, segment=20 * MIB, most=10 * MIB, step=2 * MIB,
               pools=True, keep=lambda rest, size: True, take=min, fits=lambda rest, size: rest >= size):
    rests, reserved = {}, 0
    for nbytes in sizes:
        size = -(-nbytes // block) * block
        pool = rests.setdefault(size <= small or not pools, [])
        room = take([rest for rest in pool if fits(rest, size)] or [0])
        if room:
            pool.remove(room)
        else:
            room = small_segment if size <= small else segment if size < most else -(-size // step) * step
            reserved += room
        if keep(room - size, size):
            pool.append(room - size)
    return reserved


# --- second ----------------------------------------------------------------------------------------------------------


def release(blocks, i):
    first = last = i
    if i > 0 and blocks[i - 1][1]:
        first -= 1
    if i + 1 < len(blocks) and blocks[i + 1][1]:
        last += 1
    size = sum(size for size, _ in blocks[first : last + 1])
    return [*blocks[:first], (size, True), *blocks[last + 1 :]]


def release_in_place(blocks, i):
    size, _ = blocks[i]
    if blocks[i + 1 :] and blocks[i + 1][1]:
        size += blocks.pop(i + 1)[0]
    if blocks[:i] and blocks[i - 1][1]:
        i -= 1
        size += blocks.pop(i)[0]
    blocks[i] = size, True
    return blocks


def release_by_groups(blocks, i):
    marked = [(size, free or j == i, None if free or j == i else j) for j, (size, free) in enumerate(blocks)]
    return [(sum(size for size, *_ in group), free)
            for (free, _), group in ((key, list(group)) for key, group in groupby(marked, key=lambda each: each[1:]))]


def release_with_a_stack(blocks, i):
    done = []
    for j, (size, free) in enumerate(blocks):
        free = free or j == i
        if free and done and done[-1][1]:
            size += done.pop()[0]
        done.append((size, free))
    return done


def release_with_fault(blocks, i, *, before=True, after=True, wrap=False, free=True, own=False):
    first = i - 1 if before and (i or wrap) and blocks[i - 1][1] else i
    last = i + 1 if after and i + 1 < len(blocks) and blocks[i + 1][1] else i
    if first < 0:
        return [*blocks[1:-1], (blocks[0][0] + blocks[-1][0], True)]
    size = blocks[i][0] if own else sum(size for size, _ in blocks[first : last + 1])
    return [*blocks[:first], (size, free), *blocks[last + 1 :]]


def all_that_is_free(blocks, i):
    marked = [(size, free or j == i) for j, (size, free) in enumerate(blocks)]
    return [each for each in marked if not each[1]] + [(sum(size for size, free in marked if free), True)]


def all_alike(blocks, i):
    marked = [(size, free or j == i) for j, (size, free) in enumerate(blocks)]
    return [(sum(size for size, _ in group), free) for free, group in groupby(marked, key=lambda each: each[1])]


# --- third -----------------------------------------------------------------------------------------------------------


def lost(snapshot):
    internal = external = 0
    for segment in snapshot.segments:
        for block in segment["blocks"]:
            if block["state"] == "inactive":
                external += block["size"]
            else:
                internal += block["size"] - block["requested_size"]
    return internal, external


def lost_by_segments(snapshot):
    internal = sum(segment["allocated_size"] - segment["requested_size"] for segment in snapshot.segments)
    external = sum(segment["total_size"] - segment["allocated_size"] for segment in snapshot.segments)
    return internal, external


def lost_by_sums(snapshot):
    blocks = [block for segment in snapshot.segments for block in segment["blocks"]]
    live = [block for block in blocks if block["state"].startswith("active")]
    taken = sum(block["size"] for block in live)
    return [taken - sum(block["requested_size"] for block in live), sum(block["size"] for block in blocks) - taken]


def lost_with_fault(snapshot, *, state="inactive", segments=None, whole=False):
    internal = external = 0
    for segment in snapshot.segments[:segments]:
        for block in segment["blocks"]:
            if block["state"] == state and not (whole and len(segment["blocks"]) > 1):
                external += block["size"]
            elif block["state"] != state:
                internal += block["size"] - block["requested_size"]
    return internal, external


def all_of_it(snapshot):
    return lost(snapshot)[0], sum(block["size"] - block["requested_size"] for segment in snapshot.segments
                                  for block in segment["blocks"] if block["state"] != "inactive")


ANSWERS = {
    page.first: Answers(
        right=[predict, predict_by_bisection, predict_by_the_paper],
        wrong=[
            (sum, "[1]: you say 1, 2,097,152 bytes are reserved: the smallest segment is 2 MiB"),
            (partial(with_fault, block=1), "[1048575, 1048575, 1]: you say 2,097,152, 4,194,304 bytes are reserved: "
                                           "each size is rounded up to a multiple of 512 bytes"),
            (partial(with_fault, keep=lambda rest, size: False), "a rest that is as large as the request has room"),
            (partial(with_fault, keep=lambda rest, size: size <= MIB), "what is left of a segment serves the next"),
            (partial(with_fault, keep=lambda rest, size: rest >= 2 * MIB), "a rest that is as large as the request"),
            (partial(with_fault, keep=lambda rest, size: rest >= 2 * MIB or size <= MIB),
             "what is left of a rounded segment serves other requests"),
            (partial(with_fault, fits=lambda rest, size: rest > size),
             "a rest that is as large as the request has room"),
            (partial(with_fault, small=MIB - 1), "up to 1 MiB a request is small"),
            (partial(with_fault, small=2 * MIB), "[1048577]: you say 2,097,152, 20,971,520 bytes are reserved"),
            (partial(with_fault, pools=False), "small requests have segments of their own"),
            (partial(with_fault, most=12 * MIB), "from 10 MiB on, a segment is as large as its request"),
            (partial(with_fault, most=10 * MIB + 1), "from 10 MiB on, a segment is as large as its request"),
            (partial(with_fault, most=9 * MIB), "below 10 MiB a large segment is 20 MiB"),
            (partial(with_fault, step=512), "a segment's size is rounded up to a multiple of 2 MiB"),
            (partial(with_fault, step=20 * MIB), "from 10 MiB on, a segment is as large as its request"),
            (partial(with_fault, take=max), "the smallest rest that has room is taken, not the first"),
            (partial(with_fault, take=lambda rests: rests[0]),
             "the smallest rest that has room is taken, not the first"),
            (partial(with_fault, take=lambda rests: rests[-1]), "is taken, not the last, nor the largest"),
            (lambda sizes: 20 * MIB * -(-sum(sizes) // (20 * MIB)), "the smallest segment is 2 MiB")],
    ),
    page.second: Answers(
        right=[release, release_in_place, release_by_groups, release_with_a_stack],
        wrong=[
            (partial(release_with_fault, before=False), "you say [(512, True), (3072, True)], expected [(3584, True)]: "
                                                        "it joins both neighbours"),
            (partial(release_with_fault, after=False), "you say [(1536, True), (2048, True)], expected [(3584, True)]"),
            (partial(release_with_fault, before=False, after=False), "it joins both neighbours"),
            (partial(release_with_fault, wrap=True), "the last block is no neighbour of the first"),
            (partial(release_with_fault, free=False), "block 0 of [(2048, False)] is freed: you say [(2048, False)]"),
            (partial(release_with_fault, own=True), "it joins both neighbours"),
            (all_that_is_free, "its neighbours are live"),
            (all_alike, "its neighbours are live"),
            (lambda blocks, i: release(blocks, i)[i], "expected 2 values (a number, True or False)"),
            (lambda blocks, i: [size for size, _ in release(blocks, i)], "expected 2 values (a number, True or False)"),
            (lambda blocks, i: [[size, int(free)] for size, free in release(blocks, i)], "expected True or False")],
    ),
    page.third: Answers(
        right=[lost, lost_by_segments, lost_by_sums],
        wrong=[
            (all_of_it, "bytes in free blocks, there are"),
            (lambda snapshot: (0, lost(snapshot)[1]), "settings default: you say 0 bytes lost within live blocks"),
            (lambda snapshot: lost(snapshot)[::-1], "bytes lost within live blocks, there are"),
            (lambda snapshot: (lost(snapshot)[0], sum(lost(snapshot))), "bytes in free blocks, there are"),
            (partial(lost_with_fault, state="active_allocated"), "bytes lost within live blocks, there are"),
            (partial(lost_with_fault, segments=1), "bytes lost within live blocks, there are"),
            (partial(lost_with_fault, whole=True), "bytes in free blocks, there are"),
            (lambda snapshot: (lost(snapshot)[0], max(block["size"] for segment in snapshot.segments for block in
                                                      segment["blocks"] if block["state"] == "inactive")),
             "bytes in free blocks, there are"),
            (lambda snapshot: sum(lost(snapshot)), "expected 2 values (a number, a number)")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
