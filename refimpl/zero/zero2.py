"""ZeRO stage 2: gradients, too, are kept in shards: a rank keeps only the gradients of the elements that it updates.

As soon as a bucket is complete it is reduce_scattered, its shard is kept, and the whole is freed at once. So gradients
take 4Ψ/N and the buckets in flight. Bytes with Adam in fp32: 4Ψ + 4Ψ/N + 8Ψ/N. "ZeRO" (Rajbhandari et al. 2020),
section 5.2.

Accumulation costs traffic: there are no whole gradients to add to, so each of k micro-batches is reduced, k · Ψ, and
with the parameters (k + 1)Ψ in place of 2Ψ.
"""

import contextlib
from typing import TYPE_CHECKING

from .reducer import ReduceScatterAtOnce
from .zero1 import Zero1

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Zero2(Zero1):
    """`Zero1` that keeps gradients in shards: same arguments and errors, same numbers, the same 2Ψ on the wire.

    Each rank of N holds p + (g + k) / N bytes a parameter: p of the parameter, g of its gradient, k of optimizer state
    and master. Backward reduces each bucket as soon as it is full and keeps this rank's part. m micro-batches send
    (m + 1)Ψ. "ZeRO" (Rajbhandari et al. 2020), section 5.2.
    """

    stage, reducer_type = 2, ReduceScatterAtOnce

    def no_sync(self) -> "AbstractContextManager[None]":
        """No-op: each micro-batch is reduced, since no rank has room for whole gradients."""
        return contextlib.nullcontext()
