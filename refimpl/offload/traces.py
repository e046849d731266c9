"""What an engine asks of its store in a step, in closed form: from it, bytes on a disk and on each link, 0 off.

An update needs one bucket after the other, and changes its states (12 bytes of an element in mixed precision, 8 in
fp32). From stage 2 on gradients come when they are reduced and go when they are used. At stage 3 a bucket's shard of
parameters is read whenever it is gathered, and changed by the update.

    for each micro-batch    [("need" and "same", ("parameters", i)) for each gather i]     stage 3
                            ("need", if it is not the first,) "changed", ("gradients", i)  stages 2 and 3
    for each bucket i       "need" of its kinds; "drop" of gradients; "changed" of the rest

`DiskStore` reads at each "need" and writes at each "changed", in whole blocks:

    file      Σ_key ⌈b / 4096⌉ · 4096, and what lies free between (`disk.extents`)
    read      Σ_need ⌈b / 4096⌉ · 4096
    written   Σ_changed ⌈b / 4096⌉ · 4096

What a `TieredStore` moves of it depends on its capacities: `tiers.step_simulator` replays the same trace.
"""

import torch

from .disk.extents import FileExtents
from .disk.file import aligned

MOMENTS = 2
LOW = (torch.float16, torch.bfloat16)


def stored_bytes(buckets, stage, *, rank=0, reduce_dtype=None, moments=MOMENTS, persistent=()):
    """Return {key: bytes} of all that an engine stores, by key: ("states", 3), ("gradients", 3), ("parameters", 3).

    `buckets`: `engine.buckets`, of any size on the "meta" device; `persistent`: those of stage 3 that stay whole.
    """
    found = {}
    for i, bucket in enumerate(buckets):
        low, mine = bucket.dtype in LOW, sum(piece.end - piece.first for piece in bucket.pieces(rank))
        itemsize = 4 if low else bucket.dtype.itemsize
        found["states", i] = (4 * bucket.shard_numel if low else 0) + moments * itemsize * mine
        whole = stage == 1 and reduce_dtype in (None, bucket.dtype)  # gradients are a part of a whole buffer
        if not whole or bucket.shard_numel == bucket.numel:
            found["gradients", i] = bucket.shard_numel * (reduce_dtype or bucket.dtype).itemsize
        if stage == 3 and bucket not in persistent:
            found["parameters", i] = bucket.shard_numel * bucket.dtype.itemsize
    return found


def least_device_bytes(buckets, stage, **options):
    """Compute the least `device` of a TieredStore: what is computed with at a time, all of one bucket in its update.
    Arguments as of `stored_bytes`.

        max_i Σ_kind b(kind, i)
    """
    held = stored_bytes(buckets, stage, **options)
    return max((sum(held.get((kind, i), 0) for kind in ("states", "gradients", "parameters"))
                for i in range(len(buckets))), default=0)


def engine_trace(buckets, stage, *, micro_batches=1, gathers=(), seconds=0.0, **options):
    """Return the trace of a step, [(what, key, bytes, seconds of computation before it)], from the second step on.

    `gathers`: at stage 3, the buckets that a micro-batch gathers, one after the other
    (`refimpl.zero.closed_forms.gathers`); `seconds`: of the computation with one bucket; `options`: as of
    `stored_bytes`.
    """
    held, trace = stored_bytes(buckets, stage, **options), []
    number = {bucket: i for i, bucket in enumerate(buckets)}
    reductions = [i for i in range(len(buckets)) if ("gradients", i) in held]
    for micro_batch in range(micro_batches if stage >= 2 else 1):
        for bucket in gathers:
            key = "parameters", number[bucket]
            trace += [("need", key), ("same", key)]
        for i in reductions:
            trace += [("need", ("gradients", i))] * (micro_batch > 0) + [("changed", ("gradients", i))]
    for i in range(len(buckets)):
        kinds = [kind for kind in ("states", "gradients", "parameters") if (kind, i) in held]
        trace += [("need", (kind, i)) for kind in kinds]
        trace += [("hint", (kind, i + 1)) for kind in kinds if (kind, i + 1) in held]
        trace += [("drop" if kind == "gradients" else "changed", (kind, i)) for kind in kinds]
    return [(what, key, held[key], seconds if what in ("changed", "same") else 0.0) for what, key in trace]


def disk_store_bytes(buckets, stage, **options):
    """Compute the bytes of a DiskStore's file, by replaying the first puts: masters come before there are moments, so
    places are given back and taken again. Arguments as of `stored_bytes`."""
    held, extents = stored_bytes(buckets, stage, **options), FileExtents()
    for kind, masters in (("parameters", None), ("states", 4), ("gradients", None)):
        for i, bucket in enumerate(buckets):
            if (kind, i) in held and not (kind == "states" and bucket.dtype not in LOW):
                extents.allocate((kind, i), masters * bucket.shard_numel if masters else held[kind, i])
    for i in range(len(buckets)):
        extents.allocate(("states", i), held["states", i])
    return extents.end


def disk_store_traffic(buckets, stage, **options):
    """Compute {"read": bytes, "written": bytes} of a DiskStore in one step; arguments as of `engine_trace`."""
    trace = engine_trace(buckets, stage, **options)
    return {way: sum(aligned(nbytes) for what, _, nbytes, _ in trace if what == asked)
            for way, asked in (("read", "need"), ("written", "changed"))}
