"""ZeRO stage 2: gradients, too, are kept in shards: what a rank does not update it need not keep the gradient of.

As soon as a bucket is complete it is reduce_scattered, its shard is kept, and the whole is freed at once. So gradients
take 4Ψ/N and what is under way. Bytes with Adam in fp32: 4Ψ + 4Ψ/N + 8Ψ/N. "ZeRO" (Rajbhandari et al. 2020), section
5.2.

Under accumulation this costs traffic: whole gradients are not there to be added up on, so each of k micro-batches is
reduced, k · Ψ, and with the parameters (k + 1)Ψ in place of 2Ψ.
"""

import contextlib

import torch

from ..memory import mark
from .data_parallel import DataParallel
from .zero1 import Zero1


class Zero2(Zero1):
    """`Zero1` that keeps gradients in shards: same arguments, same numbers."""

    stage = 2

    def no_sync(self):
        """Nothing changes in here: each micro-batch is reduced, since no rank has room for whole gradients."""
        return contextlib.nullcontext()

    def _take(self, bucket, parameter):
        """The gradient is copied to its bucket's buffer and freed; or is the buffer, if it fills it alone."""
        if parameter.numel() == bucket.numel and self.reduce_dtype in (None, bucket.dtype):
            self._gradients[bucket] = mark(parameter.grad.reshape(-1), "gradients")
            parameter.grad = None
            return
        self._allocate(bucket)
        self._views[parameter].copy_(parameter.grad)
        parameter.grad = None

    _allocate = DataParallel._allocate

    def _buffer(self, bucket):
        dtype = self.reduce_dtype or bucket.dtype
        return mark(torch.zeros(bucket.numel, dtype=dtype, device=bucket.device), "gradients")

    def _reduce(self, bucket):
        """Begin to average one bucket."""
        return self.comm.reduce_scatter(self._gradients[bucket], "avg", async_op=True)

    def _reduced(self, bucket, shard):
        self._add(bucket, mark(shard, "gradients"))
        del self._gradients[bucket]
        for slot in bucket.slots:
            self._views.pop(slot.parameter, None)
