"""Exercises of the page *Disk and tiers*."""

import contextlib
import random
import tempfile

import torch

from refimpl import memory
from refimpl.offload import DiskStore

from . import exercise, readable
from .asking import ANYTHING, Asked

HINTS = {
    "first": [
        "Each bucket has a place of whole blocks, 4,096 bytes each.",
        "Whole blocks are read, too, so both numbers are the same: the sum of the sizes, each rounded up to blocks."],
    "second": [
        "`future.index(key)` says how far away the next need of a key is. It raises ValueError for a key that is not "
        "in `future`.",
        "A key that never comes again is the furthest of all: give it `len(future)`. Return the key of `here` with "
        "the largest distance."],
    "third": [
        "Nothing may be freed before all is written. So write all tensors first, then free all of them.",
        "An unbuffered `file.write` may write less than it was given. It returns how many bytes it has written; raise "
        "OSError if they are too few. Or reserve first: `os.posix_fallocate(file.fileno(), begin, nbytes)`.",
        "`x.untyped_storage().resize_(0)` frees a tensor's memory, `resize_(x.nbytes)` gives it memory again. Remember "
        "the tensors of a key until `get`."]}


@contextlib.contextmanager
def files_limited_to(nbytes):
    """Let no file of this process grow beyond `nbytes`, as if the disk were full. On Linux and macOS."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(sizes)`, which returns the bytes of a DiskStore's file, and the bytes that it reads in a step that
    needs each bucket once. `sizes`: the bytes of each bucket."""
    for sizes in ((8192, 4096), (4000, 12, 8200), (40_000, 40_004, 4), (4096,) * 5, (12_289,)):
        said = predict(sizes)
        with tempfile.TemporaryDirectory() as folder, DiskStore(folder, buffer_bytes=16384) as store:
            for key, nbytes in enumerate(sizes):
                store.put(key, [torch.zeros(nbytes, dtype=torch.uint8)])
            for key in range(len(sizes)):
                store.get(key)
            measured = store.file_bytes, store.traffic.read
        for what, mine, right in zip(("has a file of", "reads"), said, measured, strict=True):
            if mine != right:
                return f"buckets of {sizes} bytes: you say that the store {what} {mine:,} bytes, it {what} {right:,}"
    return None


def _orders():
    rng = random.Random(0)
    yield 3, list(range(6)) * 5
    yield 4, [*range(6), *reversed(range(6))] * 4
    for _ in range(8):
        yield rng.randint(2, 5), [rng.randrange(7) for _ in range(40)]


def _loads(order, room, which):
    """Replay an order; return how many buckets are loaded once all have been made, or what is wrong with a choice."""
    here, loaded = list(dict.fromkeys(order))[-room:], 0
    for now, key in enumerate(order):
        if key not in here:
            loaded += 1
            gone = which(tuple(here), tuple(order[now:]))
            if gone not in here:
                return f"there are {here}, and you evict {gone!r}"
            here[here.index(gone)] = key
    return loaded


def _belady(here, future):
    return max(here, key=lambda key: (*future, key).index(key))


@exercise("loads", int)
def second(which):
    """Grade `which(here, future)`, which returns the key of `here` to evict: `future` are the keys that are needed from
    now on, in their order."""
    for room, order in _orders():
        found, best = _loads(order, room, which), _loads(order, room, _belady)
        if isinstance(found, str):
            return found
        if found > best:
            return f"room for {room}, order {order}: you load {found} buckets, Belady's rule {best}"
    return None


UNIT = 2**18  # bytes


def _bucket(*units):
    """Return tensors of so many units of bytes: the first of 4 bytes an element, the others of 8."""
    dtypes = (torch.float32, *[torch.float64] * len(units))
    return [torch.randn(8, int(n * UNIT) // 8 // dtype.itemsize, dtype=dtype)
            for n, dtype in zip(units, dtypes, strict=False)]


def _put(store, key, tensors):
    """Return whether `put` raised OSError, and the bytes that it freed."""
    with memory.track(tensors) as t:
        try:
            store.put(key, tensors)
        except OSError:
            return True, 0
    return False, t.start.total - t.now.total


def _get(store, key):
    store.get(key)


def _same(tensors, copies):
    return all(readable(x) and x.shape == copy.shape and torch.equal(x, copy)
               for x, copy in zip(tensors, copies, strict=True))


@exercise("parity and bytes")
def third(make):
    """Grade `make(folder)`, which returns a store with `put(key, tensors)` and `get(key)` that loses nothing when the
    disk is full: `put` raises OSError then, and all tensors still have their memory."""
    torch.manual_seed(0)
    put, get = Asked(_put, ANYTHING), Asked(_get, ANYTHING)
    with tempfile.TemporaryDirectory() as folder:
        store = make(folder)
        if not (callable(getattr(store, "put", None)) and callable(getattr(store, "get", None))):
            return f"expected an object with `put` and `get`, you return {store!r:.60} ({type(store).__name__})"
        return _with_room(store, put, get) or _without_room(store, put, get)


def _with_room(store, put, get):
    buckets = {key: _bucket(1, 0.5) for key in range(3)}
    for _ in range(2):
        copies = {key: [x.clone() for x in tensors] for key, tensors in buckets.items()}
        for key, tensors in buckets.items():
            nbytes = sum(x.nbytes for x in tensors)
            raised, freed = put(store, key, tensors)
            if raised:
                return "`put` raises OSError, but there is room on the disk"
            if freed < nbytes:
                return f"after `put`, {nbytes - freed:,} bytes of {nbytes:,} are still in memory"
        for key, tensors in reversed(buckets.items()):
            get(store, key)
            if not all(map(readable, tensors)):
                return "after `get`, tensors have no memory"
            if not _same(tensors, copies[key]):
                return "after `put` and `get`, tensors have other numbers"
            for x in tensors:
                x.mul_(-2)  # the next `put` has to store these
    return None


def _without_room(store, put, get):
    """Let no file be longer than 6 units. The first tensor fits, the second does not, whether there is one file for
    all, of which 4.5 units are taken, or one for each key or tensor."""
    tensors = _bucket(1, 7)
    copies = [x.clone() for x in tensors]
    with files_limited_to(6 * UNIT):
        raised, _ = put(store, "last", tensors)
    if not raised:
        return "the disk was full, and `put` did not raise OSError: did all bytes reach the file?"
    if lost := sum(not readable(x) for x in tensors):
        return f"`put` raised, but {lost} of 2 tensors have lost their memory: free it when all is written"
    if not _same(tensors, copies):
        return "`put` raised, and the tensors have other numbers"
    if put(store, "last", tensors)[0]:
        return "with room again, `put` after the error raises OSError"
    get(store, "last")
    if not _same(tensors, copies):
        return "with room again, `put` and `get` after the error return other numbers"
    return None
