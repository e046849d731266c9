"""The allocator: what a block costs, what a replay costs, and what each policy and setting leaves unused.

    block       allocate and free of GPUMemoryPool beside torch.empty and its free, with so many blocks live
    reserved    the most that is reserved beside the most that is live, on the programs of `traces`
    capacity    the least memory with which the program runs beside the most that is live: segments that are free go
                back to the device before a request fails, so this is less

Bytes are simulated, and the same on every machine. So on a GPU only recordings of PyTorch's own allocator are made, and
replayed.
"""

import random
import time

import torch
from tqdm import tqdm

from refimpl.allocator import CachingAllocator, GPUMemoryPool, Settings, replay
from refimpl.allocator.free_list import PlannedPool
from refimpl.allocator.settings import MIB
from refimpl.common.allocations import Maker

from .record import row
from .recordings import rows_of_recordings
from .runner import BAR_DELAY, compare
from .traces import PROGRAMS, trace_of

LIVE = (100, 1_000, 10_000, 100_000)  # blocks
BLOCK_BOUND, BLOCKS_AT_BOUND, REPLAY_BOUND = 6.0, 10_000, 20.0  # times torch.empty, and seconds
SETTINGS = ("", "expandable_segments:True", "max_split_size_mb:32", "max_split_size_mb:128",
            "roundup_power2_divisions:8")
POLICIES = ("first_fit", "best_fit")
PLENTY = 2**44  # bytes
EVENTS = 1_000_000


def run(device="cpu", live=LIVE, programs=tuple(PROGRAMS), events=EVENTS, rounds=11):
    """Make all readings: (settings, rows)."""
    settings = {"rounds": rounds, "events": events, "programs": list(programs), "torch.empty": "on the CPU"}
    return settings, all_rows(device, live, programs, events, rounds)


def all_rows(device, live, programs, events, rounds):
    """Yield the rows of blocks, of the replay, and of each program."""
    if torch.device(device).type == "cuda":
        yield from rows_of_recordings()
        return
    for count in live:
        for policy in POLICIES:
            yield block_row(count, policy, rounds)
    yield replay_row(events)
    for program in tqdm(programs, "programs", delay=BAR_DELAY, leave=False):
        trace = trace_of(program)
        for name, make in allocators().items():
            found = replay(trace, make(PLENTY))
            yield row(f"reserved, {program}, {name}", "live at the peak", "MB", found.peak / 1e6, trace.peak / 1e6)
        for name, make in allocators().items():
            yield row(f"capacity, {program}, {name}", "live at the peak", "MB", least_capacity(trace, make) / 1e6,
                      trace.peak / 1e6)


def allocators():
    """Return {name: function of a capacity in bytes} of all settings and policies."""
    caching = {text or "PyTorch's default": lambda capacity, text=text: CachingAllocator(capacity, text)
               for text in SETTINGS}
    return caching | {f"one pool, {policy}": lambda capacity, policy=policy: PlannedPool(capacity, policy)
                      for policy in POLICIES}


def least_capacity(trace, make):
    """Return the least capacity in bytes, to 0.5 %, with which a replay does not fail."""
    def fails(capacity):
        try:
            return replay(trace, make(capacity)).failure is not None
        except ValueError:  # below the largest request
            return True

    low, high = trace.peak, replay(trace, make(PLENTY)).peak
    while fails(high):  # where there is an end, best fit chooses other holes than in plenty
        high += int(0.005 * low)
    while high - low > 0.005 * low:
        middle = (low + high) // 2
        low, high = (middle, high) if fails(middle) else (low, middle)
    return high


def block_row(count, policy, rounds, size=256, pairs=1000):
    """Return a row: microseconds of allocate and free with `count` live blocks, beside torch.empty and its free."""
    with GPUMemoryPool(4 * count * size * 4, policy=policy, device="cpu") as pool:
        dice = random.Random(0)
        blocks = [pool.allocate((dice.randrange(1, 8) * size,), torch.uint8) for _ in range(2 * count)]
        dice.shuffle(blocks)
        for block in blocks[count:]:
            pool.free(block)
        sizes = [(dice.randrange(1, 8) * size,) for _ in range(pairs)]
        kept = [torch.empty(3 * size, dtype=torch.uint8) for _ in range(count)]

        def ours():
            for shape in sizes:
                pool.free(pool.allocate(shape, torch.uint8))

        def theirs():
            for shape in sizes:
                del_me = torch.empty(shape, dtype=torch.uint8)
                del del_me

        timing = compare({"ours": ours, "theirs": theirs}, rounds=rounds, title=f"{count} blocks")
        for block in blocks[:count]:
            pool.free(block)
        del kept
    return row(f"block, {count} live, {policy}", "torch.empty and its free", "us", timing.median("ours") / pairs * 1e6,
               timing.median("theirs") / pairs * 1e6, paired=timing.paired("ours", "theirs"),
               **({"bound": BLOCK_BOUND} if count == BLOCKS_AT_BOUND else {}))


def replay_row(events):
    """Return a row: seconds of a replay of so many events."""
    dice, found, live = random.Random(0), Maker(), []
    for _ in range(events):
        if live and dice.random() < len(live) / 4000:
            found.free(live.pop(dice.randrange(len(live))))
        else:
            live.append(found.alloc(int(2 ** dice.uniform(8, 23))))
    trace, began = found.trace(), time.perf_counter()
    replay(trace, settings=Settings(), capacity=64 * 2**10 * MIB)
    seconds = time.perf_counter() - began
    return row(f"replay of {events:,} events", "", "s", seconds, None, bound=REPLAY_BOUND)
