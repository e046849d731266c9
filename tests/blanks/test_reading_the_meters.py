"""What readers build in place of ours is told right from wrong."""

from itertools import accumulate
from math import ceil

from exercises_kit import Answers, graded

from blanks import reading_the_meters as page

# --- live_bytes ------------------------------------------------------------------------------------------------------


def by_a_loop(tensors, block=1):
    seen, total = set(), 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += (storage.nbytes() + block - 1) // block * block
    return total


def by_ceil(tensors, block=1):
    return float(sum(block * ceil(s.nbytes() / block) for s in {t.untyped_storage()._cdata: t.untyped_storage()
                                                                for t in tensors}.values()))


def with_fault(tensors, block=1, *, key=lambda t: t.untyped_storage().data_ptr(),
               size=lambda t: t.untyped_storage().nbytes(), rounded=lambda n, block: -(-n // block) * block):
    return sum(rounded(nbytes, block) for nbytes in {key(t): size(t) for t in tensors}.values())


def faulty(**parts):
    return lambda tensors, block=1: with_fault(tensors, block, **parts)


# --- peak_bytes ------------------------------------------------------------------------------------------------------


def by_accumulating(changes, block=1):
    sizes = [(abs(each) + -abs(each) % block) * (1 if each > 0 else -1) for each in changes]
    line = list(accumulate(sizes, initial=0))
    return max(line), line[-1]


def by_counting_blocks(changes, block=1):
    now, highest = 0, 0
    for each in changes:
        if each > 0:
            now += (each + block - 1) // block
        else:
            now -= (-each + block - 1) // block
        if now > highest:
            highest = now
    return [highest * block, now * block]


def replayed(changes, block=1, *, up=lambda n, block: (abs(n) + -abs(n) % block) * (1 if n > 0 else -1), peak=max):
    line = [0]
    for each in changes:
        line.append(line[-1] + up(each, block))
    return peak(line), line[-1]


def rounded_in_the_end(changes, block=1):
    peak, now = page.peak_bytes(changes)
    return -(-peak // block) * block, -(-now // block) * block


def with_a_first_peak(changes, block=1):
    now, peak = 0, changes[0] if changes else 0
    for each in changes[1:]:
        now += each
        peak = max(peak, now)
    return peak, now


def with_no_first_peak(changes, block=1):
    """Gives (None, 0) where nothing changes."""
    line = list(accumulate(-(-abs(each) // block) * block * (1 if each > 0 else -1) for each in changes))
    return max(line, default=None), line[-1] if line else 0


ANSWERS = {
    page.check_live_bytes: Answers(
        right=[page.live_bytes, by_a_loop, by_ceil],
        wrong=[
            (lambda tensors, block=1: sum(t.nbytes for t in tensors),
             "a weight and its transpose, in blocks of 1: you say 40,000; storages of [20000] bytes take 20,000"),
            (faulty(size=lambda t: t.nbytes), "a slice, in blocks of 1: you say 400"),
            (faulty(size=lambda t: 4 * t.numel()), "a slice, in blocks of 1: you say 400"),
            (faulty(size=lambda t: t.numel()), "a weight and its transpose, in blocks of 1: you say 5,000"),
            (faulty(size=lambda t: t.untyped_storage().nbytes() // t.itemsize), "in blocks of 1: you say 5,000"),
            (faulty(key=id), "a weight and its transpose, in blocks of 1: you say 40,000"),
            (faulty(key=lambda t: t.data_ptr()), "a weight and two slices of it, in blocks of 1: you say 60,000"),
            (faulty(key=lambda t: t.untyped_storage().nbytes()), "two weights of one shape, in blocks of 1: you say"),
            (faulty(key=lambda t: t.shape), "a weight and its transpose, in blocks of 1: you say 40,000"),
            (faulty(rounded=lambda n, block: n), "in blocks of 512: you say 20,000; storages of [20000] bytes take"),
            (faulty(rounded=lambda n, block: n // block * block), "in blocks of 512: you say 19,968"),
            (faulty(rounded=lambda n, block: (n // block + 1) * block), "in blocks of 1: you say 20,001"),
            (faulty(rounded=lambda n, block: (n + block) // block * block if block > 1 else n),
             "one tensor, twice, in blocks of 512: you say 1,536"),
            (faulty(rounded=lambda n, block: -(-n // 512) * 512 if block > 1 else n), "in blocks of 100: you say"),
            (lambda tensors, block=1: -(-with_fault(tensors) // block) * block, "in blocks of 512: you say 40,448")],
    ),
    page.check_peak_bytes: Answers(
        right=[page.peak_bytes, by_accumulating, by_counting_blocks],
        wrong=[
            (lambda changes, block=1: page.peak_bytes(changes), "in blocks of 512: you say 1,112 at the peak"),
            (lambda changes, block=1: page.peak_bytes(changes, block)[0], "expected 2 values (a number, a number)"),
            (lambda changes, block=1: page.peak_bytes(changes, block)[::-1],
             "changes [100, 600, -100, 512, -600, 30], in blocks of 1: you say 542 at the peak and 1,112 at the end"),
            (lambda changes, block=1: (sum(each for each in changes if each > 0), sum(changes)),
             "in blocks of 1: you say 1,242 at the peak and 542 at the end; it is 1,112 and 542"),
            (lambda changes, block=1: (max(changes, default=0), sum(changes)), "you say 600 at the peak"),
            (lambda changes, block=1: replayed(changes, block, peak=lambda line: line[-1]), "you say 542 at the peak"),
            (lambda changes, block=1: replayed(changes, block, up=lambda n, block: -(-n // block) * block),
             "in blocks of 512: you say 2,048 at the peak and 2,048 at the end; it is 1,536"),
            (lambda changes, block=1: replayed(changes, block, up=lambda n, block: n // block * block),
             "in blocks of 512: you say"),
            (rounded_in_the_end, "changes [300, -300, 200, 1], in blocks of 512: you say 512 at the peak and 512 at"),
            (with_no_first_peak, "changes [], in blocks of 1: expected a number, you return None"),
            (lambda changes, block=1: page.peak_bytes(changes, block) if changes else None,
             "changes [], in blocks of 1: your function gives None; with no change it is 0 and 0"),
            (with_a_first_peak, "in blocks of 1: you say 1,012 at the peak and 442 at the end; it is 1,112 and 542"),
            (lambda changes, block=1: page.peak_bytes(changes[:-1], block), "at the peak and 512 at the end"),
            (lambda changes, block=1: page.peak_bytes(changes, 512 if block > 1 else 1), "in blocks of 100: you say")],
        same=("> → >=", "peak, now → now, peak"),  # no change is 0; a maximum has no order
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_the_tensors_of_the_check_have_the_storages_that_it_says():
    for what, (tensors, storages) in page._tensors().items():
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        assert sorted(filter(None, found.values())) == sorted(storages), what
