"""ZeRO stage 2: gradients, too, are kept in shards: a rank keeps only the gradients of the elements that it updates.

As soon as a bucket is complete it is reduce_scattered, its shard is kept, and the whole is freed at once. So gradients
take 4Ψ/N and the buckets in flight. Bytes with Adam in fp32: 4Ψ + 4Ψ/N + 8Ψ/N. "ZeRO" (Rajbhandari et al. 2020),
section 5.2.

Accumulation costs traffic: there are no whole gradients to add to, so each of k micro-batches is reduced, k · Ψ, and
with the parameters (k + 1)Ψ in place of 2Ψ.
"""

import contextlib

from .zero1 import ReduceScatter, Zero1


class ReduceScatterAtOnce(ReduceScatter):
    """Frees whole gradients as soon as they are reduced."""

    def take(self, parameter):
        """Move the gradient to its bucket's buffer; `parameter.grad` is None again."""
        gradient, parameter.grad = parameter.grad, None
        if parameter in self.views:  # used twice: by two recomputations
            self.views[parameter].add_(gradient)
        else:
            self.views[parameter] = self.placed(parameter, gradient)

    def buffer_dtype(self, bucket):
        """Return the dtype of the reduction. The buffer is not kept, so it need not have the gradients' own."""
        return self.dtype or bucket.dtype

    def reduce(self, bucket):
        """Launch the reduce_scatter of one bucket."""
        if self.hooked:
            return self.by_hook("reduce_scatter", bucket)
        return self.comm.reduce_scatter(self.flat[bucket], "avg", async_op=True, label=bucket.name)

    def reduced(self, bucket, shard):
        """Keep the shard of the averaged gradients, and free the whole."""
        self.encoded(bucket)
        self.keep(bucket, shard)

    def encoded(self, bucket):
        """Free the whole gradients: nobody reads them any more."""
        self.flat.pop(bucket, None)
        for slot in bucket.slots:
            self.views.pop(slot.parameter, None)


class Zero2(Zero1):
    """`Zero1` that keeps gradients in shards: same arguments and errors, same numbers, the same 2Ψ on the wire.

    Each rank of N holds p + (g + k) / N bytes a parameter: p of the parameter, g of its gradient, k of optimizer state
    and master. Backward reduces each bucket as soon as it is full and keeps this rank's part. m micro-batches send
    (m + 1)Ψ. "ZeRO" (Rajbhandari et al. 2020), section 5.2.
    """

    stage, reducer_type = 2, ReduceScatterAtOnce

    def no_sync(self):
        """No-op: each micro-batch is reduced, since no rank has room for whole gradients."""
        return contextlib.nullcontext()
