"""Exercises of the page *A GPU without a GPU*."""

import math
import random

from refimpl.allocator import CachingAllocator, replay
from refimpl.allocator.settings import MIB
from refimpl.common.allocations import Maker

from . import exercise

HINTS = {
    "first": [
        "Cut the first dimension: rank 0 has the rows divided by the world size, rounded up, and all other dimensions "
        "whole. An element has 4 bytes.",
        "A block is a multiple of 512 bytes. Round the bytes of each shard up, before you add them.",
        "Each shard is there four times: parameter, gradient and two moments."],
    "second": [
        "List the divisors of `batch` in ascending order. If one of them fits, all smaller ones fit, too. So halve the "
        "list with each rehearsal.",
        "Keep two places: of a divisor that fits, 0 at first, and of one that does not, `len(sizes)` at first. "
        "Rehearse the divisor in the middle. It fits if `rehearse(micro)[\"out of memory\"] is None`.",
        "Stop when the places are neighbours. The divisor at the first place is the answer."],
    "third": [
        "Two numbers of the message are unused bytes: what of the GPU is free, and what is reserved by PyTorch but "
        "unallocated.",
        "`re.findall(r\"([0-9.]+) (bytes|KiB|MiB|GiB)\", message)` finds six pairs of a number and its unit: asked, "
        "capacity, free, in use, allocated, unallocated.",
        "Multiply each number by its unit, 1, 2¹⁰, 2²⁰ or 2³⁰. Then compare the first with the third plus the last."]}

# What the page takes for a blank of its own, of lines in a script.
MICRO_BATCHES = """\
    for rows in tokens.split(4):
        (loss_of(rows) * len(rows) / len(tokens)).backward()
"""

WORDS = ("CUDA out of memory. Tried to allocate {}. GPU 0 has a total capacity of {} of which {} is free. Including "
         "non-PyTorch memory, this process has {} memory in use. Of the allocated memory {} is allocated by PyTorch, "
         "and {} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
         "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
         "Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-"
         "alloc-conf)")


@exercise("bytes", int)
def first(between_steps):
    """Grade `between_steps(shapes, world)`: the bytes that rank 0 of `world` has allocated for parameters, gradients
    and Adam's two moments in fp32, each a tensor of its own, cut along its first dimension."""
    for shapes, world in (([(8, 64)], 1), ([(1000, 3), (1000,)], 1), ([(10, 300)], 4), ([(1,), (7, 7, 7)], 8),
                          ([(4096, 160), (4096,), (513, 11)], 8)):
        pieces = [4 * -(-rows // world) * math.prod(rest) for rows, *rest in shapes]
        allocator = CachingAllocator()
        for nbytes in pieces * 4:
            allocator.allocate(nbytes)
        right, said = allocator.allocated, between_steps(list(shapes), world)
        if said == right:
            continue
        reason = {4 * sum(pieces): "; each tensor has a block of its own, a multiple of 512 bytes",
                  right * 3 // 4: "; a parameter has a gradient and two moments beside it",
                  right // 4: "; that is for parameters alone",
                  _blocks(4 * math.prod(shape) for shape in shapes): "; rank 0 has one shard of each tensor",
                  _blocks(4 * math.prod(shape) / world for shape in shapes):
                      "; whole rows are cut off: rank 0 has the rows divided by the world size, rounded up",
                  _blocks(4 * (rows // world) * math.prod(rest) for rows, *rest in shapes):
                      "; rank 0 has the rows divided by the world size, rounded up, not down"}.get(said, "")
        where = f"{shapes} on {world} rank{'s' * (world > 1)}"
        return f"{where}: you say {said:,}, {right:,} bytes are allocated{reason}"
    return None


def _blocks(pieces):
    """Return the bytes of four blocks for each of some tensors."""
    return sum(4 * 512 * math.ceil(nbytes / 512) for nbytes in pieces)


def rehearsal(micro, capacity, seed):
    """Return what a rehearsal would of a toy: two steps of micro-batches of `micro` rows on `CachingAllocator`."""
    dice = random.Random(seed)
    weights = [dice.randrange(2, 12) * MIB for _ in range(6)]
    rows = [dice.randrange(1, 5) * 300_000 for _ in range(12)]  # bytes of activations for a row, layer by layer
    maker, steps = Maker(), []
    [maker.alloc(nbytes) for nbytes in weights]
    for step in range(2):
        kept = [maker.alloc(micro * nbytes) for nbytes in rows]
        gradients = [maker.alloc(nbytes) for nbytes in weights]
        [maker.free(each) for each in reversed(kept)]
        if not step:
            [maker.alloc(nbytes) for nbytes in weights * 2]  # Adam's moments, after the first backward
        [maker.free(each) for each in gradients]
        done = replay(maker.trace(), capacity=capacity)
        steps.append({"reserved": int(done.peak)})
        if done.failure:
            return {"made": step, "steps": steps, "out of memory": {"step": step + 1}}
    return {"made": 2, "steps": steps, "out of memory": None}


@exercise("the micro-batch and rehearsals", int)
def second(largest):
    """Grade `largest(rehearse, batch)`: the largest micro-batch that divides the batch and fits, in few rehearsals."""
    for batch, capacity, seed in ((60, 420, 2), (16, 330, 0), (24, 260, 1), (60, 1900, 3), (48, 190, 4),
                                  (45, 170, 4)):
        tries = []

        def rehearse(micro, capacity=capacity, seed=seed, tries=tries):
            tries.append(micro)
            return rehearsal(micro, capacity * MIB, seed)

        divisors = [micro for micro in range(1, batch + 1) if batch % micro == 0]
        right = max(m for m in divisors if not rehearsal(m, capacity * MIB, seed)["out of memory"])
        said = largest(rehearse, batch)
        if said not in divisors:
            return f"you say {said:,}, which does not divide a batch of {batch}"
        if said > right:
            step = rehearsal(int(said), capacity * MIB, seed)["out of memory"]["step"]
            return f"micro-batches of {said:g} are out of memory in step {step}"
        if said < right:
            return f"you say {said:g} of a batch of {batch}; {right} fits, too"
        enough = math.ceil(math.log2(len(divisors) + 1))
        if len(tries) > enough:
            return f"right, but after {len(tries)} rehearsals for {len(divisors)} divisors; {enough} are enough"
    return None


def text_of(nbytes):
    """Write bytes as PyTorch does in its errors."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes > size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


def message(asked, capacity, allocated, unallocated):
    """Return PyTorch's words for a request that fails where the process has nothing but PyTorch's segments."""
    used = allocated + unallocated
    return WORDS.format(*map(text_of, (asked, capacity, capacity - used, used, allocated, unallocated)))


@exercise("the answer to each message", bool)
def third(fragmented):
    """Grade `fragmented(message)`: would the request have been met, had all unused bytes been one piece?"""
    for asked, capacity, allocated, unallocated in (
            (116, 450, 240, 184), (1024, 15360, 14561, 76), (700, 15360, 14400, 500), (2100, 81920, 79000, 1400),
            (1500, 40960, 38000, 2900), (2048, 81920, 80600, 300), (900, 24000, 23000, 200), (3, 15360, 15355, 2.5),
            (0.9, 15360, 15358, 1.5), (800, 15360, 14000, 1360), (1400, 15360, 14000, 1360),
            (1024, 15360, 14336, 512), (1100, 15360, 14280, 540), (1100, 15360, 14240, 560), (2, 15360, 15358.3, 1.2)):
        words = message(*(int(each * MIB) for each in (asked, capacity, allocated, unallocated)))
        free, right = capacity - allocated - unallocated, asked <= capacity - allocated
        said = fragmented(words)
        if said != right:
            return (f"{words[:words.index(' If reserved')]} You say {said}: {free:g} MiB of the GPU and "
                    f"{unallocated:g} MiB of PyTorch's are unused, {asked:g} MiB were asked for")
    return None
