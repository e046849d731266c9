"""The time to launch ranks, and the rate of each collective beside torch.distributed's.

There are two questions. How long does a user wait for eight ranks to answer? What do the checks and the byte counts of
`refimpl.comm` cost beside the same collective called directly, on the same tensors in the same ranks?
"""

import statistics
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

from refimpl.comm import launch
from refimpl.comm.backend.torch_internals import all_gather_single, reduce_scatter_single
from refimpl.common.ledger import human

from .ranks import place_of
from .ranks import slowest as merged
from .record import row
from .runner import BAR_DELAY, Comparison, compare

SIZES = (2**10, 2**15, 2**20, 2**24)  # bytes of the full tensor
WORLDS = (2, 4)
LAUNCH_WORLD, LAUNCH_SECONDS = 8, 0.5  # ranks, and the seconds that their launch may take
LEAST_RATE = 0.95  # the rate to reach, as a share of torch.distributed's
LEAST_CALLS = 61  # of each collective: single calls differ by 40 %, so a median of 15 would be off by a tenth
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv")
TORCH, OURS = "torch.distributed", "refimpl.comm"


def run(device="cpu", sizes=SIZES, worlds=WORLDS, seconds=0.6, launches=11, least_calls=LEAST_CALLS):
    """Measure the launch and the rate of each collective: (settings, rows)."""
    devices = {world: place_of(world, device) for world in worlds}
    settings = {"sizes": list(sizes), "worlds": list(worlds), "seconds of each": seconds, "launches": launches,
                "least calls of each": least_calls,
                "tensors on": {str(world): devices[world] for world in worlds},
                "rate": "bytes of the full tensor per second of one call, slowest rank, median over calls"}
    return settings, all_rows(devices, sizes, seconds, launches, least_calls)


def all_rows(devices, sizes, seconds, launches, least_calls):
    """Yield the row of launches, then each collective's rate at every size and over all sizes.

    `devices`: {number of ranks: device}.
    """
    yield launch_row(launches)
    for world, device in devices.items():
        for collective in tqdm(COLLECTIVES, f"{world} ranks", delay=BAR_DELAY, leave=False):
            timings = slowest(launch(rates, world, collective, sizes, seconds, least_calls, device=device,
                                     timeout=300))
            found = [rate_row(collective, world, nbytes, timing) for nbytes, timing in timings.items()]
            yield from found
            yield summary_row(collective, world, found)


def launch_row(launches, world=LAUNCH_WORLD):
    """Return the row of a launch: median seconds until `world` ranks have returned from one all_reduce.

    The first call is not counted; it is in the row as `first_call`.
    """
    seconds = []
    for _ in tqdm(range(launches + 1), "launches", delay=BAR_DELAY, leave=False):
        start = time.perf_counter()
        assert launch(answer, world, device="cpu") == [world] * world
        seconds.append(time.perf_counter() - start)
    first, *rest = seconds
    timing = Comparison({"launch": rest})
    return row(f"launch of {world} ranks that all_reduce once", "limit", "s", timing.median("launch"), LAUNCH_SECONDS,
               spread=timing.spread("launch"), first_call=first)


def answer(comm):
    """Count the ranks by one all_reduce."""
    return comm.all_reduce(torch.tensor(1)).item()


def rate_row(collective, world, nbytes, seconds):
    """Return a row: bytes of the full tensor per second, ours beside torch's. A `ratio` above 1 means ours is faster.

    `paired` is the median ratio of two consecutive calls. Where scheduling makes a call take either 0.1 or 5 ms, a
    plain median is one or the other by chance; the paired ratio is steadier.
    """
    timing = Comparison(seconds)
    ours, theirs = (nbytes / timing.median(name) for name in (OURS, TORCH))
    return row(f"{collective} of {human(nbytes)} on {world} ranks", TORCH, "B/s", ours, theirs,
               paired=timing.paired(TORCH, OURS), calls=len(seconds[OURS]), seconds=timing.median(OURS),
               spread=timing.spread(OURS), peer_spread=timing.spread(TORCH))


def slowest(ranks):
    """Merge what `rates` returned on each rank: a collective lasts until the last rank has its result."""
    return {nbytes: merged([rank[nbytes] for rank in ranks]) for nbytes in ranks[0]}


def summary_row(collective, world, rows):
    """Return the row of the rate over all sizes (the geometric mean of `paired`) beside the rate to reach."""
    rate = statistics.geometric_mean(each["paired"] for each in rows)
    return row(f"{collective} on {world} ranks, of {TORCH}'s rate", "at least", "x", rate, LEAST_RATE)


# --- in a rank -------------------------------------------------------------------------------------------------------


def rates(comm, collective, sizes, seconds, least_calls):
    """Return {size: {name: seconds of each call}} of the collective, called directly and through `comm` in turns.

    The calls take about `seconds` in all, but each is made at least `least_calls` times. Single calls vary a lot, since
    each rank waits until the operating system schedules the others.
    """
    found = {}
    for nbytes in sizes:
        calls = pair(comm, collective, nbytes)
        for call in calls.values():
            call()
        start = time.perf_counter()
        calls[TORCH]()
        slowest = comm.all_reduce(torch.tensor(time.perf_counter() - start), "max").item()  # every rank agrees
        rounds = max(least_calls, min(1000, int(seconds / slowest / len(calls))))
        found[nbytes] = compare(calls, rounds=rounds).seconds
    return found


def pair(comm, collective, nbytes):
    """Return {name: function} of one collective on one tensor of `nbytes` bytes: ours and torch's, with one output."""
    N, r = comm.world_size, comm.rank
    full = torch.ones(nbytes // 4, device=comm.device)
    other, part = torch.empty_like(full), full.chunk(N)[r].clone()
    following, preceding = (r + 1) % N, (r - 1) % N

    def exchange():
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, full, following),
                                            dist.P2POp(dist.irecv, other, preceding)]):
            work.wait()

    return {
        "all_reduce": {TORCH: lambda: dist.all_reduce(full), OURS: lambda: comm.all_reduce(full, out=full)},
        "reduce_scatter": {TORCH: lambda: reduce_scatter_single(part, full),
                           OURS: lambda: comm.reduce_scatter(full, out=part)},
        "all_gather": {TORCH: lambda: all_gather_single(full, part), OURS: lambda: comm.all_gather(part, out=full)},
        "all_to_all": {TORCH: lambda: dist.all_to_all_single(other, full),
                       OURS: lambda: comm.all_to_all(full, out=other)},
        "broadcast": {TORCH: lambda: dist.broadcast(full, 0), OURS: lambda: comm.broadcast(full, 0, out=full)},
        "send_recv": {TORCH: exchange, OURS: lambda: comm.send_recv(full, following, other, preceding, out=other)},
    }[collective]
