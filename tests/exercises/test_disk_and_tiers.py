"""Right answers pass, wrong and unanswered ones do not."""

import os
import re
import tempfile
from functools import partial

from exercises_kit import Answers, graded

from exercises import disk_and_tiers as page
from refimpl.saving.durable import raw_bytes


def predict(sizes, block=4096):
    file = sum(-(-nbytes // block) * block for nbytes in sizes)
    return file, file


def one_place_for_all(sizes):
    return predict([sum(sizes)])[0], predict(sizes)[1]


def belady(here, future, furthest=max):
    return furthest(here, key=lambda key: future.index(key) if key in future else len(future))


def nobody(here, future):
    return future[0]


class Store:
    def __init__(self, folder):
        self.file, self.place, self.end, self.away = tempfile.TemporaryFile(dir=folder, buffering=0), {}, 0, {}

    def __del__(self):
        self.file.close()

    def reserve(self, key, tensors):
        size = sum(x.nbytes for x in tensors)
        if key not in self.place:
            os.posix_fallocate(self.file.fileno(), self.end, size)
            self.place[key], self.end = self.end, self.end + size

    def put(self, key, tensors):
        self.reserve(key, tensors)
        self.file.seek(self.place[key])
        for x in tensors:
            self.file.write(raw_bytes(x))
        for x in tensors:
            x.untyped_storage().resize_(0)
        self.away[key] = tensors

    def get(self, key):
        self.file.seek(self.place[key])
        for x in self.away.pop(key):
            x.untyped_storage().resize_(x.nbytes)
            self.file.readinto(raw_bytes(x))


class Trusting(Store):
    """Takes it that all was written."""

    def reserve(self, key, tensors):
        if key not in self.place:
            self.place[key], self.end = self.end, self.end + sum(x.nbytes for x in tensors)


class Early(Trusting):
    """Frees each tensor as soon as it is written."""

    def put(self, key, tensors):
        self.reserve(key, tensors)
        self.file.seek(self.place[key])
        for x in tensors:
            if self.file.write(raw_bytes(x)) < x.nbytes:
                raise OSError("short")
            x.untyped_storage().resize_(0)
        self.away[key] = tensors


class Keeping(Store):
    def put(self, key, tensors):
        self.away[key] = tensors

    def get(self, key):
        pass


class AtOnePlace(Store):
    def reserve(self, key, tensors):
        os.posix_fallocate(self.file.fileno(), 0, sum(x.nbytes for x in tensors))
        self.place[key] = 0


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, block=1), re.compile("you say .* the store has a file of 12,288|you say")),
            (one_place_for_all, re.compile("buckets of .* bytes: you say"))],
    ),
    page.second: Answers(
        right=[belady],
        wrong=[
            (partial(belady, furthest=min), re.compile("you load .* Belady's rule")),
            (nobody, "you evict")],
    ),
    page.third: Answers(
        right=[Store],
        wrong=[
            (Trusting, "did not raise OSError"),
            (Early, "1 of 2 tensors have lost their memory"),
            (Keeping, "still in memory"),
            (AtOnePlace, "other numbers")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
