"""ZeRO stage 2: gradients, too, are kept in shards: what a rank does not update it need not keep the gradient of.

As soon as a bucket is complete it is reduce_scattered, its shard is kept, and the whole is freed at once. So gradients
take 4Ψ/N and what is under way. Bytes with Adam in fp32: 4Ψ + 4Ψ/N + 8Ψ/N. "ZeRO" (Rajbhandari et al. 2020), section
5.2.

Under accumulation this costs traffic: whole gradients are not there to be added up on, so each of k micro-batches is
reduced, k · Ψ, and with the parameters (k + 1)Ψ in place of 2Ψ.
"""

import contextlib

from ..memory import mark
from .zero1 import Zero1


class Zero2(Zero1):
    """`Zero1` that keeps gradients in shards: same arguments, same numbers."""

    stage = 2

    def no_sync(self):
        """Nothing changes in here: each micro-batch is reduced, since no rank has room for whole gradients."""
        return contextlib.nullcontext()

    def _take(self, bucket, parameter):
        """The gradient is in its bucket's buffer, and there alone."""
        gradient, parameter.grad = parameter.grad, None
        self._views[parameter] = self._placed(bucket, parameter, gradient)

    def _buffer_dtype(self, bucket):
        """What it is added up in, since it is not kept."""
        return self.reduce_dtype or bucket.dtype

    def _reduce(self, bucket):
        """Begin to average one bucket."""
        return self.comm.reduce_scatter(self._gradients[bucket], "avg", async_op=True)

    def _reduced(self, bucket, shard):
        self._add(bucket, mark(shard, "gradients"))
        del self._gradients[bucket]
        for slot in bucket.slots:
            self._views.pop(slot.parameter, None)
