"""DiskStore beside the same calls of the file without it, in pairs; tiers beside Belady's rule and LRU.

A disk's rate varies from second to second, by more than what a store costs, so the calls and the store take turns, and
the median of the ratios of each pair counts.
"""

import statistics
import tempfile
import time

import torch

from refimpl import catalog
from refimpl.comm import Link
from refimpl.common.eviction import moved_bytes
from refimpl.model import GPT, GPTConfig
from refimpl.offload import DiskStore, TieredStore
from refimpl.offload.disk.buffer_pool import Buffer
from refimpl.offload.disk.file import BlockFile
from refimpl.offload.disk.space import Space
from refimpl.offload.tiers.bucket_moves import Counts
from refimpl.offload.tiers.step_simulator import simulate
from refimpl.offload.traces import engine_trace, stored_bytes
from refimpl.zero.closed_forms import gathers
from refimpl.zero.units import default_units, unit_buckets

from ..record import row
from . import fits

BUCKETS, BUCKET_BYTES, BUFFER_BYTES = 4, 64 * 2**20, 8 * 2**20
PAIRS = 7
UNIT, CYCLE, DEVICE, HOST = 2**20, 20, 6, 8  # of the tiers: bytes of a bucket; how many buckets, and how many fit
WAY, COMPUTE = 0.03, 0.02  # seconds: a bucket's way over each link, and the computation with it

NVME = Link(6e9)  # of the plan: a fast disk of today


def all_rows(device="cpu", models=fits.MODELS):
    """Yield the rates of a disk; on a CPU what tiers move and wait for, and what they would for large models."""
    yield from disk_rows(device=device)
    if torch.device(device).type == "cpu":
        yield from tier_rows()
        yield from planned_rows(models)


def by_calls(file, buffers, nbytes, way):
    """Write or read `nbytes` block by block, through buffers that are there: the calls alone."""
    for i, offset in enumerate(range(0, nbytes, buffers[0].nbytes)):
        getattr(file, way)(buffers[i % len(buffers)].memory, offset)


def by_space(space, tensors, way):
    """Move tensors by what is between them and the file, without memory that is given back and taken anew."""
    for transfer in [getattr(space, way)(key, [tensor]) for key, tensor in enumerate(tensors)]:
        transfer.wait()


def by_store(store, tensors, way):
    """Put all buckets, until the last byte is written; or get them, each prefetched while the one before is read."""
    for key, tensor in enumerate(tensors):
        if way == "write":
            store.put(key, [tensor])
        else:
            for near in (key, key + 1)[: len(tensors) - key]:
                store.prefetch(near)
            store.get(key)
    if way == "write":
        store.flush()


def pairs(folder, count, nbytes, buffer_bytes, rounds, device="cpu"):
    """Return {way: [seconds of the calls, of the same through buffers and threads, of the whole store], …}."""
    found, total = {"write": [], "read": []}, count * nbytes
    file, buffers = BlockFile(folder), [Buffer(buffer_bytes, torch.device(device).type == "cuda") for _ in range(2)]
    file.reserve(total)
    tensors, others = ([torch.randn(nbytes // 4, device=device) for _ in range(count)] for _ in range(2))
    space = Space(folder, total, buffer_bytes, 6, 2, None)  # DiskStore's defaults
    with DiskStore(folder, capacity_bytes=total, buffer_bytes=buffer_bytes) as store:
        turns = [(by_calls, file, buffers, total), (by_space, space, others), (by_store, store, tensors)]
        for number in range(rounds + 1):
            for way, seconds in found.items():
                taken = [0.0] * len(turns)
                for which in ((0, 1, 2), (2, 1, 0))[number % 2]:
                    move, *given = turns[which]
                    begun = time.perf_counter()
                    move(*given, way)
                    taken[which] = time.perf_counter() - begun
                if number:
                    seconds.append(taken)
    space.close()
    file.close()
    return found


def disk_rows(folder=None, count=BUCKETS, nbytes=BUCKET_BYTES, buffer_bytes=BUFFER_BYTES, rounds=PAIRS,
              device="cpu"):
    """Yield the rate of a DiskStore beside that of the calls alone: with tensors that keep their memory, as those of a
    GPU's caching allocator do; and with host memory that goes back to the kernel and comes anew, which costs more than
    the store does (a first touch may run at 0.6 GB/s where a copy runs at 30)."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        found = pairs(place, count, nbytes, buffer_bytes, rounds, device)
    gigabytes = count * nbytes / 1e9
    for way, seconds in found.items():
        for which, what, held in ((1, f"disk, {way}", {"held": 0.9}), (2, f"disk, {way}, memory anew", {})):
            calls, ours = (statistics.median(gigabytes / each[i] for each in seconds) for i in (0, which))
            yield row(what, "the calls alone", "GB/s", ours, calls,
                      paired=statistics.median(each[0] / each[which] for each in seconds), **held)


def update_trace(count=CYCLE, nbytes=UNIT, seconds=COMPUTE):
    """Make the trace of an update: each bucket in turn, the next one prefetched."""
    trace = []
    for key in range(count):
        trace += [("need", key, nbytes, 0.0), *([("hint", key + 1, nbytes, 0.0)] if key + 1 < count else []),
                  ("changed", key, nbytes, seconds)]
    return trace


def run_update(store, tensors, steps, seconds, first):
    """Run the same on a store; return its Counts from step `first` on."""
    for key, tensor in enumerate(tensors):
        store.put(key, [tensor])
    for step in range(steps):
        if step == first:
            store.plan.counts = Counts()
        for key, tensor in enumerate(tensors):
            store.get(key)
            if key + 1 < len(tensors):
                store.prefetch(key + 1)
            time.sleep(seconds)
            store.put(key, [tensor])
    return store.counts


def tier_rows(folder=None, count=CYCLE, device=DEVICE, host=HOST, nbytes=UNIT, steps=28, first=8, real=(6, 3)):
    """Yield bytes that tiers move, beside Belady's rule with the whole future and beside LRU; and stalls, beside the
    simulator's. `real`: steps of the run, and the first that counts."""
    plain = [("need" if what == "hint" else what, key, size) for what, key, size, _ in update_trace(count, nbytes)]
    link, fast = Link(nbytes / WAY), Link(1e12)
    sizes = {"device": device * nbytes, "host": host * nbytes}
    ours, lru = (simulate(update_trace(count, nbytes), dict.fromkeys(("in", "out", "disk"), fast), **sizes, rule=rule,
                          steps=steps, first=first) for rule in ("belady", "lru"))
    number = (steps - first) * 1e6
    for loaded, ways, capacity in (("loaded to the device", {"target": "device"}, device),
                                   ("read from the disk", {"source": "disk"}, device + host - 1)):
        best = moved_bytes(plain, capacity * nbytes, steps=steps, first=first)["loaded"]
        yield row(f"bytes of a step {loaded}", "Belady offline", "MB", ours.bytes(**ways) / number, best / number,
                  held=1.05)
        yield row(f"bytes of a step {loaded}", "LRU", "MB", ours.bytes(**ways) / number, lru.bytes(**ways) / number)
    links = dict.fromkeys(("in", "out"), link)
    with (tempfile.TemporaryDirectory(dir=folder) as place,
          TieredStore(place, **sizes, links=links, disk_link=link, buffer_bytes=-(-nbytes // 4096) * 4096) as store):
        found = run_update(store, [torch.zeros(nbytes // 4) for _ in range(count)], real[0], COMPUTE, real[1])
        expected = simulate(store.trace(), {**links, "disk": link}, **sizes, steps=real[0] + 1, first=real[1] + 1)
    number = real[0] - real[1]
    yield row("seconds stalled in a step, tiers", "simulator", "s", found.stalled / number, expected.stalled / number,
              held=1.1, hits=found.hits / found.accesses)


def planned_rows(models):
    """Yield the seconds of a step of each model under a TieredStore at stage 3 beside those of its computation alone,
    by the simulator: on each card with each host memory, and a disk for the rest.

    `device`: what the card has beside the peak of the same step with all shards elsewhere.
    """
    for name in models:
        config = GPTConfig.named(name)
        model = GPT(config, dtype=torch.bfloat16, device="meta")
        buckets = unit_buckets(list(model.named_parameters()), default_units(model), 1)
        held = stored_bytes(buckets, 3)
        working = 2 * max(sum(held[kind, i] for kind in ("states", "gradients", "parameters"))
                          for i in range(len(buckets)))
        for room, card in fits.CARDS.items():
            hardware, taken = catalog.hardware(card), fits.taken(name, "HostStore, all")
            compute = fits.seconds(taken, card, config.parameter_count())["computation"]
            trace = engine_trace(buckets, 3, gathers=gathers(model, buckets))
            each = compute / sum(what in ("same", "changed") for what, *_ in trace)
            trace = engine_trace(buckets, 3, gathers=gathers(model, buckets), seconds=each)
            link = Link(hardware.pcie_bandwidth)
            device = max(hardware.memory_bytes - taken.device, working)
            for host in fits.HOSTS:
                found = simulate(trace, {"in": link, "out": link, "disk": NVME}, device, host)
                yield row(f"tiers, {name}, all", f"computation alone, {room} and {host / 2**30:.0f} GB of host memory",
                          "s", found.seconds, compute, device=device / 1e9,
                          disk=max(0, sum(held.values()) - device - host) / 1e9,
                          to_device=found.bytes(target="device") / 1e9, from_disk=found.bytes(source="disk") / 1e9,
                          to_disk=found.bytes(target="disk") / 1e9, hits=found.hits / found.accesses)
