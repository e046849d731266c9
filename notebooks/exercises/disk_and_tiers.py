"""Exercises of the page *Disk and tiers*."""

import contextlib
import random
import tempfile

import torch

from refimpl.common.eviction import moved_bytes
from refimpl.offload import DiskStore

from . import exercise

UNIT = 2**18  # bytes


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
    for sizes in ((8192, 4096), (4000, 12, 8200), (40_000, 40_004, 4), (4096,) * 5):
        said = tuple(predict(sizes))
        with tempfile.TemporaryDirectory() as folder, DiskStore(folder, buffer_bytes=16384) as store:
            for key, nbytes in enumerate(sizes):
                store.put(key, [torch.zeros(nbytes, dtype=torch.uint8)])
            for key in range(len(sizes)):
                store.get(key)
            read = store.file_bytes, store.traffic.read
        if said != read:
            return (f"buckets of {sizes} bytes: you say {said}, the store has a file of {read[0]:,} bytes and read "
                    f"{read[1]:,}")
    return None


def _orders():
    rng = random.Random(0)
    yield 3, list(range(6)) * 5
    yield 4, [*range(6), *reversed(range(6))] * 4
    for _ in range(8):
        yield rng.randint(2, 5), [rng.randrange(7) for _ in range(40)]


def _loads(order, room, which):
    """Replay an order; return how many buckets are loaded once all have been made."""
    here, loaded = list(dict.fromkeys(order))[-room:], 0
    for now, key in enumerate(order):
        if key in here:
            continue
        loaded += 1
        gone = which(tuple(here), tuple(order[now:]))
        if gone not in here:
            return f"there are {here}, and you evict {gone!r}"
        here[here.index(gone)] = key
    return loaded


@exercise("what is computed")
def second(which):
    """Grade `which(here, future)`, which returns the key of `here` to evict: `future` are the keys that are needed from
    now on, in their order."""
    for room, order in _orders():
        found = _loads(order, room, which)
        made = [("changed", key, 1) for key in dict.fromkeys(order)]
        kept = list(dict.fromkeys(order))[-room:]
        asked = [(what, key, 1) for key in order for what in ("need", "same")]
        here = [("need", key, 1) for key in kept] + [("same", key, 1) for key in kept]
        best = moved_bytes([*made, *here, *asked], room)["loaded"] - _before(made, here, room)
        if isinstance(found, str):
            return found
        if found > best:
            return f"room for {room}, order {order}: you load {found}, Belady's rule {best}"
    return None


def _before(made, here, room):
    return moved_bytes([*made, *here], room)["loaded"]


@exercise("what is computed")
def third(make):
    """Grade `make(folder)`, which returns a store with `put(key, tensors)` and `get(key)` that loses nothing when the
    disk is full: `put` raises OSError then, and all tensors still have their memory."""
    with tempfile.TemporaryDirectory() as folder:
        store = make(folder)
        buckets = {key: [torch.randn(UNIT // 4), torch.randn(UNIT // 8)] for key in range(3)}
        copies = {key: [x.clone() for x in tensors] for key, tensors in buckets.items()}
        complaint = _stored(store, buckets, copies)
        if complaint:
            return complaint
        tensors = [torch.randn(UNIT // 4) for _ in range(2)]
        expected = [x.clone() for x in tensors]
        with files_limited_to(6 * UNIT):  # 4.5 are taken
            try:
                store.put("last", tensors)
                return "the disk was full, and `put` did not raise OSError: did all bytes reach the file?"
            except OSError:
                lost = sum(not x.untyped_storage().nbytes() for x in tensors)
        if lost or not all(map(torch.equal, tensors, expected)):
            return f"`put` raised, but {lost} of 2 tensors have lost their memory: free it when all is written"
        store.put("last", tensors)
        store.get("last")
        if not all(map(torch.equal, tensors, expected)):
            return "with room again, `put` and `get` after the error return other numbers"
    return None


def _stored(store, buckets, copies):
    for key, tensors in buckets.items():
        store.put(key, tensors)
        left = sum(x.untyped_storage().nbytes() for x in tensors)
        if left:
            return f"after `put`, {left:,} bytes of the tensors are still in memory"
    for key, tensors in buckets.items():
        store.get(key)
        if not all(x.untyped_storage().nbytes() == x.nbytes for x in tensors):
            return "after `get`, tensors have no memory"
        if not all(map(torch.equal, tensors, copies[key])):
            return "after `put` and `get`, tensors have other numbers"
    return None
