"""Right answers pass, wrong and unanswered ones do not."""

import os
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from exercises_kit import Answers, graded

from exercises import disk_and_tiers as page
from refimpl.offload import disk_store
from refimpl.saving.durable import raw_bytes

# --- first -----------------------------------------------------------------------------------------------------------


def predict(sizes):
    blocks = sum(-(-nbytes // 4096) for nbytes in sizes)
    return 4096 * blocks, 4096 * blocks


def place_by_place(sizes):
    end = 0
    for nbytes in sizes:
        end += nbytes
        end += -end % 4096
    return [end, end]


def by_the_store(sizes):
    nbytes = disk_store.file_bytes(dict(enumerate(sizes)))
    return nbytes, nbytes


def blocks_of(sizes, block=4096, more=0):
    return tuple(2 * [sum((nbytes + more) // block * block for nbytes in sizes)])


# --- second ----------------------------------------------------------------------------------------------------------


def which(here, future):
    def distance(key):
        return future.index(key) if key in future else len(future)

    return max(here, key=distance)


def by_striking_off(here, future):
    """Strike off what comes; the last one left goes."""
    left = list(here)
    for key in future:
        if key in left and len(left) > 1:
            left.remove(key)
    return left[0]


def by_the_first_places(here, future):
    first = {key: place for place, key in reversed(list(enumerate(future)))}
    return sorted(here, key=lambda key: first.get(key, float("inf")))[-1]


def furthest(here, future, *, choose=max, absent=float("inf"), window=None):
    seen = future[:window]
    return choose(here, key=lambda key: seen.index(key) if key in seen else absent)


# --- third -----------------------------------------------------------------------------------------------------------


class Store:
    """One file for each key."""

    def __init__(self, folder):
        self.folder, self.away = folder, {}

    def put(self, key, tensors):
        with open(f"{self.folder}/{key}", "wb", buffering=0) as file:
            for x in tensors:
                if file.write(raw_bytes(x)) < x.nbytes:
                    raise OSError(f"no room for all of {key}")
        for x in tensors:
            x.untyped_storage().resize_(0)
        self.away[key] = tensors

    def get(self, key):
        with open(f"{self.folder}/{key}", "rb", buffering=0) as file:
            for x in self.away.pop(key):
                x.untyped_storage().resize_(x.nbytes)
                file.readinto(raw_bytes(x))


class Reserving:
    """One file for all keys; the room is reserved first."""

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


class OfArrays:
    """A file for each tensor, by numpy; other memory after `get`."""

    def __init__(self, folder):
        self.folder, self.away = Path(folder), {}

    def put(self, key, tensors):
        for i, x in enumerate(tensors):
            content = x.numpy().tobytes()
            if (self.folder / f"{key}-{i}").write_bytes(content) != len(content):
                raise OSError
        self.away[key] = [(x, x.shape) for x in tensors]
        for x in tensors:
            x.data = x.new_empty(0)

    def get(self, key):
        for i, (x, shape) in enumerate(self.away.pop(key)):
            x.data = torch.from_numpy(np.fromfile(self.folder / f"{key}-{i}", x.numpy().dtype).reshape(shape))


class Trusting(Reserving):
    """Takes it that all was written."""

    def reserve(self, key, tensors):
        if key not in self.place:
            self.place[key], self.end = self.end, self.end + sum(x.nbytes for x in tensors)


class TrustingFiles(Store):
    def put(self, key, tensors):
        with open(f"{self.folder}/{key}", "wb", buffering=0) as file:
            for x in tensors:
                file.write(raw_bytes(x))
        for x in tensors:
            x.untyped_storage().resize_(0)
        self.away[key] = tensors


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


class EarlyFiles(Store):
    """Frees all, whatever happens."""

    def put(self, key, tensors):
        try:
            super().put(key, tensors)
        finally:
            for x in tensors:
                x.untyped_storage().resize_(0)


class Keeping(Store):
    def put(self, key, tensors):
        self.away[key] = tensors

    def get(self, key):
        del self.away[key]


class Cached(Store):
    """Has copies in memory, too."""

    def put(self, key, tensors):
        self.cached = [x.clone() for x in tensors]
        super().put(key, tensors)


class AtOnePlace(Reserving):
    def reserve(self, key, tensors):
        os.posix_fallocate(self.file.fileno(), 0, sum(x.nbytes for x in tensors))
        self.place[key] = 0


class Once(Store):
    """Writes a key when it first comes."""

    def put(self, key, tensors):
        if not os.path.exists(f"{self.folder}/{key}"):
            return super().put(key, tensors)
        for x in tensors:
            x.untyped_storage().resize_(0)
        self.away[key] = tensors


class Forgetting(Store):
    def get(self, key):
        self.away.pop(key)


class Zeros(Store):
    def get(self, key):
        for x in self.away.pop(key):
            x.untyped_storage().resize_(x.nbytes)
            x.zero_()


class InFp32(OfArrays):
    def get(self, key):
        for i, (x, _) in enumerate(self.away.pop(key)):
            x.data = torch.from_numpy(np.fromfile(self.folder / f"{key}-{i}", np.float32).reshape(8, -1))


class Silent(Store):
    def put(self, key, tensors):
        try:
            super().put(key, tensors)
        except OSError:
            pass  # the tensors are still there

    def get(self, key):
        if key in self.away:
            super().get(key)


class Stubborn(Store):
    """After one error, it is over."""

    broken = False

    def put(self, key, tensors):
        if self.broken:
            raise OSError("broken")
        try:
            super().put(key, tensors)
        except OSError:
            self.broken = True
            raise


class OtherError(Store):
    def put(self, key, tensors):
        try:
            super().put(key, tensors)
        except OSError as error:
            raise RuntimeError("full") from error


ANSWERS = {
    page.first: Answers(
        right=[predict, place_by_place, by_the_store],
        wrong=[
            (lambda sizes: (sum(sizes), sum(sizes)),
             "buckets of (4000, 12, 8200) bytes: you say that the store has a file of 12,212 bytes, it has a file of "
             "20,480"),
            (lambda sizes: (predict(sizes)[0], sum(sizes)), "the store reads 12,212 bytes, it reads 20,480"),
            (lambda sizes: predict([sum(sizes)]), "the store has a file of 12,288 bytes, it has a file of 20,480"),
            (lambda sizes: (predict(sizes)[0], predict([sum(sizes)])[1]), "reads 12,288 bytes, it reads 20,480"),
            (blocks_of, "(4000, 12, 8200) bytes: you say that the store has a file of 8,192"),
            (partial(blocks_of, more=4096), "(8192, 4096) bytes: you say that the store has a file of 20,480"),
            (partial(blocks_of, block=512, more=511), "(4000, 12, 8200) bytes: you say that the store has a file of"),
            (lambda sizes: predict(sizes)[0], "expected 2 values")],
    ),
    page.second: Answers(
        right=[which, by_striking_off, by_the_first_places],
        wrong=[
            (partial(furthest, choose=min), "buckets, Belady's rule"),
            (partial(furthest, absent=-1), "buckets, Belady's rule"),
            (partial(furthest, window=3, absent=3), "buckets, Belady's rule"),
            (lambda here, future: max(here, key=lambda key: (*here, *future)[::-1].index(key)), "Belady's rule"),
            (lambda here, future: min(here, key=lambda key: (key, *future)[::-1].index(key)), "Belady's rule"),
            (lambda here, future: min(here, key=future.count), "buckets, Belady's rule"),
            (lambda here, future: here[0], "room for 3, order"),
            (lambda here, future: here[-1], "buckets, Belady's rule"),
            (lambda here, future: here.index(which(here, future)), "there are [3, 4, 5], and you evict 2"),
            (lambda here, future: max(here, key=future.index), "your function raises ValueError"),
            (lambda here, future: future[0], "there are [3, 4, 5], and you evict 0"),
            (lambda here, future: future[-1], "and you evict")],
    ),
    page.third: Answers(
        right=[Store, Reserving, OfArrays],
        wrong=[
            (Trusting, "did not raise OSError"),
            (TrustingFiles, "did not raise OSError"),
            (Silent, "did not raise OSError"),
            (OtherError, "your function raises RuntimeError: full"),
            (Early, "1 of 2 tensors have lost their memory"),
            (EarlyFiles, "2 of 2 tensors have lost their memory"),
            (Stubborn, "with room again, `put` after the error raises OSError"),
            (Cached, "after `put`, 393,216 bytes of 393,216 are still in memory"),
            (AtOnePlace, "tensors have other numbers"),
            (Once, "tensors have other numbers"),
            (Zeros, "tensors have other numbers"),
            (InFp32, "tensors have other numbers"),
            (Forgetting, "after `get`, tensors have no memory"),
            (lambda folder: {}, "expected an object with `put` and `get`, you return {} (dict)")],
        saves_nothing=(Keeping, "after `put`, 393,216 bytes of 393,216 are still in memory"),
        same=("0 → 1",),  # a file with a buffer, which raises what the disk does
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
