"""Offload in closed form: bytes in device and host memory, bytes on the link in a step, and what the link makes of it.

A rank has n elements of p bytes in its shards, with gradients of g bytes and two moments. Per element, in mixed
precision p = g = 2, the master 4, the moments 8; m reductions in a step (1 at stage 1, all micro-batches from stage 2
on); h, the share of CPUAdam in host memory, is its `ratio`:

    bytes of an element    on the device            in host memory      link to host     link to device
    no offload             p + g + 12               0                   0                0
    HostStore, stage 1     p + g                    12                  12               12
    HostStore, stage 2     p                        12 + g              12 + m g         12 + m g
    HostStore, stage 3     0                        12 + g + p          12 + m g + p     12 + m g + p (1 + gathers)
    CPUAdam, stages 1–3    p + g (1) + 12 (1 − h)   (12 + g) h          m g h            p h

(1) at stage 1 in the whole buffer, at stages 2 and 3 (1 − h) g. At stages 1 and 2 parameters are whole on each rank.
"ZeRO-Offload" (Ren et al. 2021), section 4.1, counts 4 bytes of an element on the link in a step, as here; "ZeRO-
Infinity" (Rajbhandari et al. 2021), section 3, says which bandwidth each state needs. The functions below count the
padding of buckets, the ends of parts, and the memory for copies, too, and are exact.
"""

import torch

from ..common.ledger import Ledger
from .copies import TO_DEVICE, TO_HOST
from .cpu_adam import SUB_GROUP_SIZE
from .host_part import host_numel

MOMENTS = 2
LOW = (torch.float16, torch.bfloat16)


def host_store_bytes(buckets, stage, *, rank=0, reduce_dtype=None, moments=MOMENTS, frozen=()):
    """Return {"device": Ledger, "host": bytes} of what a HostStore holds after a backward, and of the states that it
    leaves on the device: Adam's counters are there, and at stage 1 gradients, in whole buffers.

    `buckets`: of an engine of this stage (`engine.buckets`), of any size on the "meta" device; `frozen`: its
    `frozen_buckets`. `moments`: tensors that the optimizer keeps. ValueError for a stage that is not 0 to 3; at stage 0
    all is on the device.
    """
    if not _is_in_shards(stage):
        return _whole(buckets)
    host = states = gradients = 0
    for bucket in buckets:
        mine = [piece.end - piece.first for piece in bucket.pieces(rank)]
        itemsize = 4 if bucket.dtype in LOW else bucket.dtype.itemsize
        host += (4 * bucket.shard_numel if bucket.dtype in LOW else 0) + moments * itemsize * sum(mine)
        states += 4 * len(mine)
        apart = stage >= 2 or reduce_dtype not in (None, bucket.dtype)
        host += bucket.shard_numel * (reduce_dtype or bucket.dtype).itemsize * apart
        gradients += 0 if apart else bucket.nbytes
    if stage == 3:
        host += sum(bucket.shard_numel * bucket.dtype.itemsize for bucket in (*buckets, *frozen))
    return {"device": Ledger({"optimizer state": states, "gradients": gradients}), "host": host}


def host_store_traffic(buckets, stage, *, rank=0, micro_batches=1, clips=0, reduce_dtype=None, moments=MOMENTS,
                       gathers=()):
    """Return {direction: bytes} of what a HostStore copies in one step, from the second on.

    `clips`: how often gradients are clipped: they come twice, once to be measured and once to be scaled. `gathers`: at
    stage 3, the buckets that a step gathers, one after the other (`refimpl.zero.closed_forms.gathers`).
    """
    if not _is_in_shards(stage):
        return {TO_HOST: 0, TO_DEVICE: 0}
    both = gathered = 0
    for bucket in buckets:
        mine, itemsize = sum(piece.end - piece.first for piece in bucket.pieces(rank)), bucket.dtype.itemsize
        low = bucket.dtype in LOW
        both += (4 * bucket.shard_numel if low else 0) + moments * (4 if low else itemsize) * mine
        if stage >= 2 or reduce_dtype not in (None, bucket.dtype):
            reductions = micro_batches if stage >= 2 else 1
            both += (reductions + 2 * clips) * bucket.shard_numel * (reduce_dtype or bucket.dtype).itemsize
        both += bucket.shard_numel * itemsize if stage == 3 else 0
    if stage == 3:
        gathered = micro_batches * sum(bucket.shard_numel * bucket.dtype.itemsize for bucket in gathers)
    return {TO_HOST: both, TO_DEVICE: both + gathered}


def cpu_adam_bytes(buckets, stage, *, ratio=1.0, sub_group_size=SUB_GROUP_SIZE, reduce_dtype=None, rank=0,
                   several=False):
    """Return {"device": Ledger, "host": bytes} of the states and gradients of a CPUAdam after the second backward.

    Arguments as of `host_store_bytes`; `several`: whether gradients are reduced more than once in a step. The device's
    Ledger counts Adam's counters as on a CPU, where they are with the host's; there is one for each piece.
    """
    if not _is_in_shards(stage):
        return _whole(buckets)
    host = states = gradients = 0
    largest, reduced = {}, set()  # by dtype, elements of the largest part; dtypes of gradients
    for bucket in buckets:
        n, gradient = host_numel(bucket.shard_numel, ratio), reduce_dtype or bucket.dtype
        rest, reduced = bucket.shard_numel - n, reduced | {gradient}
        host += (12 + gradient.itemsize) * n
        largest[bucket.dtype] = max(largest.get(bucket.dtype, 0), n)
        mine, pieces = _on_device(bucket, rank, n)
        states += (4 * rest if bucket.dtype in LOW else 0) + 8 * mine + 4 * pieces
        apart = stage >= 2 or gradient != bucket.dtype
        gradients += rest * gradient.itemsize if apart else bucket.nbytes
    host += sum(2 * min(sub_group_size, n) * dtype.itemsize for dtype, n in largest.items())
    host += sum(2 * max(largest.values()) * dtype.itemsize for dtype in reduced) if several else 0
    return {"device": Ledger({"optimizer state": states, "gradients": gradients}), "host": host}


def _whole(buckets):
    """Return what stage 0 has: all on the device."""
    states = sum(MOMENTS * slot.parameter.numel() * bucket.dtype.itemsize + 4 for bucket in buckets
                 for slot in bucket.slots)
    gradients = sum(bucket.nbytes for bucket in buckets)
    return {"device": Ledger({"optimizer state": states, "gradients": gradients}), "host": 0}


def _on_device(bucket, rank, n):
    """Return (elements of pieces beyond the first n, all pieces: one in both memories is two)."""
    ends = [(piece.place, piece.place + piece.end - piece.first) for piece in bucket.pieces(rank)]
    return (sum(max(0, end - max(first, n)) for first, end in ends),
            len(ends) + sum(first < n < end for first, end in ends))


def cpu_adam_traffic(buckets, stage, *, ratio=1.0, micro_batches=1, reduce_dtype=None):
    """Return {direction: bytes} of what a CPUAdam copies in one step in which each bucket has a gradient: gradients to
    the host, once for each reduction, and weights to the device."""
    if not _is_in_shards(stage):
        return {TO_HOST: 0, TO_DEVICE: 0}
    out = back = 0
    for bucket in buckets:
        n = host_numel(bucket.shard_numel, ratio)
        out += (micro_batches if stage >= 2 else 1) * n * (reduce_dtype or bucket.dtype).itemsize
        back += n * bucket.dtype.itemsize
    return {TO_HOST: out, TO_DEVICE: back}


def link_seconds(traffic, bytes_per_second):
    """Return {direction: seconds} of a step's copies over a link that carries both directions at a time."""
    return {direction: nbytes / bytes_per_second for direction, nbytes in traffic.items()}


def pipelined(computes, copies, buffers=2):
    """Return (seconds of all, seconds that the computation waits) of tiles that are computed one after the other, each
    of which is copied when it is computed and the one before has been copied, out of so many buffers in turn.

        computed_i = max(computed_{i−1}, copied_{i−buffers}) + t_i
        copied_i = max(computed_i, copied_{i−1}) + c_i

    With equal tiles of t and c seconds: k · max(t, c) + min(t, c) in all.
    """
    computed = last = 0.0
    copied, waited = [], 0.0
    for compute, copy in zip(computes, copies, strict=True):
        free = copied[-buffers] if len(copied) >= buffers else 0.0
        waited += max(0.0, free - computed)
        computed = max(computed, free) + compute
        last = max(computed, last) + copy
        copied.append(last)
    return last, waited + max(0.0, last - computed)


def _is_in_shards(stage):
    """Tell whether states are in shards; without them, at stage 0, nothing is offloaded."""
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage={stage!r}: expected 0, 1, 2 or 3")
    return stage > 0
