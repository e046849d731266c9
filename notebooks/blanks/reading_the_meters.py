"""What the reader builds on the page *Reading the meters*: what storages take now, and what they took at the peak."""

import random

import torch

from exercises.asking import ANYTHING, NOT_YET, fault

from . import blank

HINTS = {
    "live_bytes": [
        "`tensor.untyped_storage()` is the storage, and its `nbytes()` are its bytes. A slice has the whole one.",
        "Tensors share a storage if `untyped_storage().data_ptr()` is the same: a dict by that address has each once.",
        "Round each storage up, not their sum: `-(-nbytes // block) * block`, since // rounds down."],
    "peak_bytes": [
        "Go through the changes in their order, with two numbers: the bytes now, and the most so far.",
        "A storage gives back as many blocks as it took: round `abs(change)` up, then add it or take it off.",
        "`now += blocks if change > 0 else -blocks`, then `peak = max(peak, now)`. Return both."]}


def live_bytes(tensors, block=1):
    """Return the bytes (int) that the storages of `tensors` take: each storage once,
    however many tensors share it, each rounded up to whole blocks of `block` bytes."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    nbytes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(-(-each // block) * block for each in nbytes.values())


def peak_bytes(changes, block=1):
    """Return (the most bytes at any moment, the bytes at the end).

    `changes`: in the order of time, + bytes where a storage is made and - bytes where
    it dies; there may be none. Each storage takes whole blocks of `block` bytes.
    """
    now = peak = 0
    for change in changes:
        blocks = -(-abs(change) // block) * block
        now += blocks if change > 0 else -blocks
        peak = max(peak, now)
    return peak, now


def _given(block):
    """Return the arguments that say the size of blocks: none if it is the default."""
    return [] if block == 1 else [block]


def _tensors():
    """Return {what they are: (tensors, bytes of each of their storages)}."""
    weight, row, other = torch.randn(100, 50), torch.randn(256), torch.randn(100, 50)
    counts, flags, freed = torch.arange(75), torch.ones(33, dtype=torch.bool), torch.randn(7)
    freed.untyped_storage().resize_(0)
    return {
        "a weight and its transpose": ([weight, weight.T], [20_000]),
        "a slice": ([weight[3:5]], [20_000]),
        "a weight and two slices of it": ([weight, weight[3:], weight[40]], [20_000]),
        "two weights of one shape": ([weight, other], [20_000, 20_000]),
        "one tensor, twice": ([row, row], [1024]),
        "integers of 8 bytes and booleans of 1": ([counts, flags], [600, 33]),
        "a number that is expanded to 9 × 9": ([torch.randn(1).expand(9, 9)], [4]),
        "a tensor whose storage was freed": ([row, freed], [1024]),
        "all of these": ([weight, weight.T[2], other, counts, row[5:], flags, freed], [20_000, 20_000, 600, 1024, 33]),
        "no tensor": ([], [])}


@blank(live_bytes, "bytes", float)
def check_live_bytes(live_bytes):
    """Check `live_bytes` on tensors that share storages, of several dtypes, and in blocks."""
    for block in (1, 512, 100):
        for what, (tensors, storages) in _tensors().items():
            said, right = live_bytes(tensors, *_given(block)), sum(nbytes + -nbytes % block for nbytes in storages)
            if said != right:
                return f"{what}, in blocks of {block}: you say {said:,}; storages of {storages} bytes take {right:,}"
    return None


def _changes(seed):
    """Return births and deaths of 40 storages of random sizes; some live on."""
    numbers, alive, changes = random.Random(seed), [], []
    for _ in range(40):
        alive.append(numbers.randint(1, 5000))
        changes.append(alive[-1])
        while len(alive) > 3 and numbers.random() < 0.55:
            changes.append(-alive.pop(numbers.randrange(len(alive))))
    return changes


@blank(peak_bytes, "bytes", ANYTHING)  # so that what is no pair of numbers is told with its changes
def check_peak_bytes(peak_bytes):
    """Check `peak_bytes` on a few changes by hand, and on random ones, in blocks and without."""
    by_hand = [100, 600, -100, 512, -600, 30], [300, -300, 200, 1], []
    for block in (1, 512, 100):
        for changes in (*by_hand, *map(_changes, range(3))):
            line = [0]
            for change in changes:
                size = abs(change) + -abs(change) % block
                line.append(line[-1] + (size if change > 0 else -size))
            some = f"changes {changes[:8]}{' …' * (len(changes) > 8)}, in blocks of {block}: "
            found = peak_bytes(list(changes), *_given(block))
            if found is None or found is ...:
                return NOT_YET if changes else some + "your function gives None; with no change it is 0 and 0"
            if wrong := fault(found, (float, float)):
                return some + wrong
            peak, now = found
            if (peak, now) != (max(line), line[-1]):
                return (f"{some}you say {peak:,} at the peak and {now:,} at the end; it is {max(line):,} and "
                        f"{line[-1]:,}")
    return None
