"""ZeRO stage 2: gradients, too, are kept in shards: a rank keeps only the gradients of the elements that it updates.

As soon as a bucket is complete it is reduce_scattered, its shard is kept, and the whole is freed at once. So gradients
take 4Ψ/N and the buckets in flight. Bytes with Adam in fp32: 4Ψ + 4Ψ/N + 8Ψ/N. "ZeRO" (Rajbhandari et al. 2020),
section 5.2.

Accumulation costs traffic: there are no whole gradients to add to, so each of k micro-batches is reduced, k · Ψ, and
with the parameters (k + 1)Ψ in place of 2Ψ.
"""

import contextlib

from ..memory import mark
from .zero1 import Zero1


class Zero2(Zero1):
    """`Zero1` that keeps gradients in shards: same arguments, same numbers."""

    stage = 2

    def no_sync(self):
        """No-op: each micro-batch is reduced, since no rank has room for whole gradients."""
        return contextlib.nullcontext()

    def _take(self, bucket, parameter):
        """Move the gradient to its bucket's buffer; `parameter.grad` is None again."""
        gradient, parameter.grad = parameter.grad, None
        if parameter in self._views:  # an earlier recomputation in this backward has used it, too
            self._views[parameter].add_(gradient)
        else:
            self._views[parameter] = self._placed(bucket, parameter, gradient)

    def _buffer_dtype(self, bucket):
        """Return the dtype of the reduction. The buffer is not kept, so it need not have the gradients' own."""
        return self.reduce_dtype or bucket.dtype

    def _reduce(self, bucket):
        """Launch the reduce_scatter of one bucket."""
        return self.comm.reduce_scatter(self._gradients[bucket], "avg", async_op=True, label=bucket.name)

    def _reduced(self, bucket, shard):
        """Keep the shard of the averaged gradients, and free the whole."""
        self._add(bucket, mark(shard, "gradients"))
        del self._gradients[bucket]
        for slot in bucket.slots:
            self._views.pop(slot.parameter, None)
