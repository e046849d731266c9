"""Bytes that compressed gradients put on the wire and take in memory, exactly.

p bytes of a bucket's payload, N ranks, each bucket for itself:

    DataParallel, random               2(N−1)/N · p       all_reduce, of k numbers
    DataParallel, powersgd             2(N−1)/N · p       all_reduce, of whole tensors with P, then of Q
    DataParallel, others                  (N−1) · p       all_gather
    Zero1 to 3, random                  (N−1)/N · p       reduce_scatter, p of N chunks
    Zero1 to 3, others                  (N−1)/N · p       all_to_all, p of N chunks

Without compression it is 2(N−1)/N, and for shards (N−1)/N, of the gradients' bytes. Zero1 to 3 send parameters besides,
which are not compressed.
"""

import torch

from ..comm.traffic import Traffic, ring_traffic
from .powersgd import FactorLayout


def gradient_traffic(compressor, layouts, world_size, rank=0, shards=False, dtype=torch.float32):
    """Return the Traffic of one reduction of all buckets on `rank` of `world_size`; `shards`: of a rank's shards alone,
    as Zero1 to 3 reduce. `layouts`: as an engine's hook gets them (`numel`, `slots`); `dtype`: on the wire."""
    N, sent = world_size, Traffic()
    for layout in layouts:
        if compressor.coder is None:
            factors = FactorLayout([shape for _, shape in layout.slots], compressor.ratio, compressor.rank)
            for numel in (factors.whole_numel + sum(factors.p_sizes), sum(factors.q_sizes)):
                sent += Traffic(all_reduce=ring_traffic("all_reduce", numel * dtype.itemsize, N, rank, dtype.itemsize))
            continue
        kind = (("reduce_scatter" if shards else "all_reduce") if compressor.coder.summed else
                "all_to_all" if shards else "all_gather")
        chunks = N if shards else 1
        payload = chunks * compressor.coder.payload_bytes(layout.numel // chunks, dtype.itemsize)
        total = payload * N if kind == "all_gather" else payload
        itemsize = dtype.itemsize if compressor.coder.summed else 1
        sent += Traffic({kind: ring_traffic(kind, total, N, rank, itemsize)})
    return sent


def residual_bytes(compressor, layouts, before_step=False):
    """Return the bytes of what error feedback keeps on each rank: 4 of each element, 8 of fp64's, twice that from
    backward to step. powersgd's factors are not counted."""
    if not compressor.error_feedback:
        return 0
    return (2 if before_step else 1) * sum(layout.numel * max(4, layout.dtype.itemsize) for layout in layouts)
