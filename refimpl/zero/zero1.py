"""ZeRO stage 1: each rank keeps the optimizer's state of 1/N of the parameters, and updates those alone.

Data parallelism makes every rank compute the same update of every parameter, from N equal copies of Adam's two moments
(and of the fp32 masters, if parameters are 16-bit). Here a rank updates its shard of each bucket, and gathers the rest:

    reduce_scatter of gradients     (N−1)/N · Ψ        a rank needs the average of its own shard alone
    all_gather of parameters        (N−1)/N · Ψ        every rank needs all parameters for the next forward

which together is what an all_reduce sends: 2Ψ, as before. Bytes with Adam in fp32: 4Ψ + 4Ψ + 8Ψ/N. "ZeRO" (Rajbhandari
et al. 2020), sections 5.1 and 7. `update` has the optimizer on shards, `WholeParameters.updated` the all_gather.
"""

from ..ground.marks import mark
from .engine import Engine
from .internals.in_shards import InShards
from .reducer import Reducer
from .update import ShardedUpdate


class ReduceScatter(Reducer):
    """Gives `update` this rank's shard of the average. Until then gradients are whole, as in data parallelism."""

    def __init__(self, *args):
        super().__init__(*args)
        self.stand_ins = {parameter: InShards(parameter, slot.name) for parameter, (_, slot) in self.place.items()}

    def begin(self, syncing):
        """Begin a backward. Buffers in which an earlier one has left shards are freed."""
        for parameter, stand_in in self.stand_ins.items():
            if parameter.grad is stand_in:
                parameter.grad = None
        if self.synced:
            for bucket in self.flat:
                self.update.copy_gradients(bucket)
            self.flat.clear()
        super().begin(syncing)

    def reduce(self, bucket):
        """Launch the reduce_scatter of one bucket; this rank's shard of the average is written in place."""
        if self.hooked:
            return self.by_hook("reduce_scatter", bucket)
        flat = self.flat[bucket]
        if self.dtype in (None, flat.dtype):
            return self.comm.reduce_scatter(flat, "avg", out=bucket.shard(flat, self.comm.rank), async_op=True,
                                            label=bucket.name)
        return self.comm.reduce_scatter(flat.to(self.dtype), "avg", async_op=True, label=bucket.name)

    def reduced(self, bucket, shard):
        """Keep the shard of the average. If it is in another dtype, or from a hook, the buffer is freed."""
        if self.hooked or shard.dtype != bucket.dtype:
            del self.flat[bucket]
        self.keep(bucket, shard)

    def keep(self, bucket, shard):
        """Give the shard to the update. Whole gradients are no longer needed."""
        self.update.add_gradients(bucket, mark(shard, "gradients"))
        for slot in bucket.slots:
            slot.parameter.grad = None
            self.views.pop(slot.parameter, None)

    def finish(self):
        """End a backward. Computing with `parameter.grad` raises RuntimeError from then on, as torch's own
        clip_grad_norm_ would: a rank has a part of the gradients alone."""
        super().finish()
        if self.syncing:
            for parameter, stand_in in self.stand_ins.items():
                parameter.grad = stand_in


class Zero1(Engine):
    """`DataParallel` with the optimizer's state in shards: same arguments, same numbers, 2Ψ on the wire.

    Parameters of 16 bits have an fp32 master, in shards too. The optimizer has to treat each element by itself, as
    Adam and SGD do; TypeError for one that does not. `no_sync` as before: gradients are whole until they are reduced,
    in the last micro-batch.
    `store`: a `ShardStore` that keeps shards while nothing computes with them; by default they remain on the device.
    `update`: what makes the optimizer on shards, by default `ShardedUpdate`, with a store `StoredUpdate`. On the host:
    `functools.partial(ShardedUpdate, device="cpu")`.
    `shards`, `replicas`: two levels of `comm`, as a mesh connects them. States are cut among the ranks of `shards`
    alone, and `replicas` are the ranks that hold the same (`hybrid`). By default all ranks of `comm` cut them.
    """

    stage, reducer_type, update_type = 1, ReduceScatter, ShardedUpdate
