"""Offload: AdamW on the host beside torch's fused kernel and the machine's memory; copies, overlap; what fits.

    rate        bytes/s of CPUAdam's tiles beside torch's fused AdamW of the same elements, with and without 16-bit
                weights: 28 bytes of an element with an fp32 gradient, and 2 for the weights
    share       the same rate beside copy_ and an in-place add, which only read and write
    link        a copy to and from page-locked memory beside pageable memory; on a CPU a copy within memory
    overlap     seconds of a step whose copies and computation take known times, beside arithmetic
    fits        bytes of a step of LLaMA-2 7B and 70B in each memory, beside what cards and hosts have (`fits.py`)
    disk        DiskStore beside the same calls of its file without it; tiers beside Belady's rule and LRU (`disk.py`)

A machine's rates vary by half within seconds, so each is read in turns with its peer, and the median of the ratios of
turns counts (`paired`). Threads of torch's kernels that have ended their work spin for milliseconds, on the cores of
whoever comes next, so each update begins `REST` seconds after the last.
"""

import functools
import statistics
import time

import torch
from torch import nn
from tqdm import tqdm

from refimpl import catalog
from refimpl.comm import FakeCommunicator, Link
from refimpl.comm.timed_compute import compute
from refimpl.common.compiling import CannotCompile
from refimpl.offload import CPUAdam
from refimpl.offload.adamw_kernels import CompiledKernel, Hyper, TorchKernel
from refimpl.offload.closed_forms import pipelined
from refimpl.offload.copies import host_bytes
from refimpl.zero import Zero1

from ..record import row
from ..runner import compare, synchronize
from . import disk, fits

ELEMENTS = 2**24  # 448 MB with gradients: no cache holds a part of it
HYPER = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 10)
STATES, WEIGHTS = 28, 2  # bytes of an element that are read and written: p, m, v both, g, p; and a 16-bit weight
HELD = {("torch", False): 0.95, ("torch", True): 0.7, ("c++", False): 0.95, ("c++", True): 0.95}
TILE_SECONDS, COPY_SECONDS, TILES = 0.04, 0.03, 20
REST = 0.02
COPIED = 2**26  # bytes of a copy on a link


def run(device="cpu", elements=ELEMENTS, rounds=21, models=fits.MODELS):
    """Make all readings: (settings, rows)."""
    settings = {"elements": elements, "rounds": rounds, "threads": torch.get_num_threads(), "tiles": CPUAdam(
        kernel="torch").sub_group_size, "models": list(models), "tokens": fits.TOKENS}
    return settings, all_rows(device, elements, rounds, models)


def all_rows(device, elements, rounds, models):
    """Yield the rates of the update, of copies, the overlap; on a CPU what fits; and those of a disk."""
    yield from rate_rows(elements, rounds)
    yield from copy_rows(device, rounds)
    yield overlap_row(device)
    if torch.device(device).type == "cpu":
        yield from fits.fit_rows(models)
    yield from disk.all_rows(device)


# --- the update ------------------------------------------------------------------------------------------------------


def tensors_of(elements):
    """Return master, moments and gradient, (elements,) fp32 each, and 16-bit weights."""
    generator = torch.Generator().manual_seed(0)
    p, m, g = (torch.randn(elements, generator=generator) for _ in range(3))
    return p, m, torch.rand(elements, generator=generator), g, torch.zeros(elements, dtype=torch.bfloat16)


def fused(p, m, v, g):
    """Make one step of torch's fused AdamW."""
    torch._fused_adamw_([p], [g], [m], [v], [], [torch.tensor(float(HYPER.step))], lr=HYPER.lr, beta1=HYPER.beta1,
                        beta2=HYPER.beta2, eps=HYPER.eps, weight_decay=HYPER.weight_decay, amsgrad=False,
                        maximize=False)


def kernels():
    """Return {name: kernel}; without a compiler torch's alone."""
    found = {"torch": TorchKernel()}
    try:
        found["c++"] = CompiledKernel()
    except CannotCompile as error:
        tqdm.write(f"no C++ kernel: {error}")
    return found


def in_tiles(kernel, tensors, low, size):
    """Update all elements in tiles, as CPUAdam does; the weights of each tile are written to the same memory."""
    p, m, v, g = tensors
    for first in range(0, p.numel(), size):
        here = slice(first, first + size)
        kernel.update(p[here], m[here], v[here], g[here], None if low is None else low[: p[here].numel()], HYPER)


def rate_rows(elements, rounds):
    """Yield the rate of each kernel beside torch's fused AdamW, then beside copy_ and an in-place add, in turns with
    each of them."""
    *tensors, low = tensors_of(elements)
    p, m, *_ = tensors
    size = CPUAdam(kernel="torch").sub_group_size
    peers = {"fused": (STATES, lambda: fused(*tensors)),
             "fused and a cast": (STATES + WEIGHTS, lambda: (fused(*tensors), low.copy_(p))),
             "copy_": (8, lambda: m.copy_(p)), "add_": (12, lambda: m.add_(p))}
    for name, kernel in kernels().items():
        for cast in (False, True):
            case = STATES + WEIGHTS * cast, functools.partial(in_tiles, kernel, tensors, low if cast else None, size)
            what = f"update, {name}, {'with' if cast else 'without'} 16-bit weights"
            for peer in peers if cast else ("fused",):
                held = {"held": HELD[name, cast]} if peer == "fused" else {}
                yield beside(what, peer, elements, case, peers[peer], rounds, held)


def rested(function):
    """Return the seconds of `function`, begun after a rest."""
    time.sleep(REST)
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def beside(what, peer, elements, ours, theirs, rounds, more):
    """Return the row of two rates, of (bytes of an element, function) each."""
    found = compare({"ours": ours[1], "peer": theirs[1]}, rounds=rounds, title=what, timer=rested)
    ratios = [ours[0] / a / (theirs[0] / b) for a, b in zip(*found.seconds.values(), strict=True)]
    rates = [each[0] * elements / found.median(name) / 1e9 for each, name in ((ours, "ours"), (theirs, "peer"))]
    return row(what, peer, "GB/s", *rates, paired=statistics.median(ratios), **more)


# --- copies and overlap ----------------------------------------------------------------------------------------------


def copy_rows(device, rounds):
    """Yield the rates of copies in each direction: from and to page-locked memory beside pageable memory."""
    on_device = torch.empty(COPIED, dtype=torch.uint8, device=device)
    locked, pageable = host_bytes(COPIED, on_device.device).zero_(), torch.zeros(COPIED, dtype=torch.uint8)
    pairs = {"to host": (lambda host: host.copy_(on_device, non_blocking=True)),
             "to device": (lambda host: on_device.copy_(host, non_blocking=True))}
    for direction, copy in pairs.items():
        found = compare({"locked": functools.partial(copy, locked), "pageable": functools.partial(copy, pageable)},
                        rounds=rounds, title=direction)
        yield row(f"copy {direction}, page-locked memory", "pageable memory", "GB/s",
                  *(COPIED / found.median(name) / 1e9 for name in ("locked", "pageable")))


class Timed:
    """A kernel that takes a known time for a tile."""

    name = "timed"

    def update(self, p, m, v, g, low, hyper):
        compute(TILE_SECONDS)
        low.copy_(p)


def overlap_row(device, tries=3):
    """Return the seconds of an update of equal tiles beside arithmetic, the quickest of a few. On a CPU the link takes
    a known time; on a GPU tiles are of as many bytes as the link carries in about that time."""
    on_gpu = torch.device(device).type == "cuda"
    rate = catalog.hardware("h100-sxm").pcie_bandwidth / 2 if on_gpu else None
    elements = int(rate * COPY_SECONDS / 2 / 4096) * 4096 if on_gpu else 4096
    update = CPUAdam(sub_group_size=elements, kernel=Timed(),
                     rate=None if on_gpu else Link(2 * elements / COPY_SECONDS))
    model = nn.Linear(4096, TILES * elements // 4096, bias=False, device=device, dtype=torch.bfloat16)
    engine = Zero1(model, FakeCommunicator(0, 1), functools.partial(torch.optim.AdamW, lr=0.0), update=update)
    taken = []
    for _ in range(tries):
        engine.backward(engine(torch.zeros(1, 4096, dtype=torch.bfloat16, device=device)).sum())
        engine.update.masters[engine.buckets[0]].wait_for_gradients()
        begun = time.perf_counter()
        engine.step()
        synchronize()
        taken.append(time.perf_counter() - begun)
    expected, _ = pipelined([TILE_SECONDS] * TILES, [COPY_SECONDS] * TILES)
    return row(f"update of {TILES} tiles, weights back meanwhile", "arithmetic", "s", min(taken), expected, held=1.1)
