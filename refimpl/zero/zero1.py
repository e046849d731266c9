"""ZeRO stage 1: each rank keeps the optimizer's state of 1/N of the parameters, and updates those alone.

Data parallelism makes every rank compute the same update of every parameter, from N equal copies of Adam's two moments
(and of the fp32 masters, if parameters are 16-bit). Here a rank updates its shard of each bucket, and gathers the rest:

    reduce_scatter of gradients     (N−1)/N · Ψ        a rank needs the average of its own shard alone
    all_gather of parameters        (N−1)/N · Ψ        every rank needs all parameters for the next forward

which together is what an all_reduce sends: 2Ψ, as before. Bytes with Adam in fp32: 4Ψ + 4Ψ + 8Ψ/N. "ZeRO" (Rajbhandari
et al. 2020), sections 5.1 and 7.
"""

import contextlib

from ..comm.backend.tensors import same_memory
from ..memory import mark
from .data_parallel import DataParallel
from .internals.in_shards import InShards
from .internals.sharded_optimizer import ShardedOptimizer
from .store import DeviceMemory


class Zero1(DataParallel):
    """`DataParallel` with the optimizer's state in shards: same arguments, same numbers, 2Ψ on the wire.

    Parameters of 16 bits have an fp32 master, in shards too. The optimizer has to treat each element by itself, as
    Adam and SGD do; TypeError for one that does not. `no_sync` as before: gradients are whole until they are reduced,
    in the last micro-batch.
    `store`: a `ShardStore` that keeps shards while nothing computes with them; by default they remain on the device.
    """

    stage = 1

    def __init__(self, *args, store=None, **options):
        self.store = DeviceMemory() if store is None else store
        super().__init__(*args, **options)
        self._stand_ins = {parameter: InShards(parameter, slot.name) for parameter, slot in self._slot_of.items()}
        for bucket in (*self.buckets, *self.frozen_buckets):
            self._store_states(bucket)

    def _make_optimizer(self, optimizer, groups, named):
        self.shards = {bucket: bucket.shard(self.flat[bucket], self.comm.rank) for bucket in self.buckets}
        self._gradient_shards = {}
        self.sharded_optimizer = ShardedOptimizer(self.buckets, self.shards, self.comm.rank, optimizer, groups, named)
        return self.sharded_optimizer.optimizer

    def backward(self, loss):
        """Compute gradients as `DataParallel.backward` does. Once they are in shards, computing with `parameter.grad`
        raises RuntimeError, as in torch.nn.utils.clip_grad_norm_: a rank has a part of them alone."""
        for parameter, stand_in in self._stand_ins.items():
            if parameter.grad is stand_in:
                parameter.grad = None
        super().backward(loss)
        if self._synced:
            for parameter, stand_in in self._stand_ins.items():
                parameter.grad = stand_in

    def zero_grad(self, set_to_none=True):
        """Drop the gradients; `step` has done so."""
        super().zero_grad()
        self._gradient_shards.clear()
        for group in self.param_groups:
            for own in group["params"]:
                own.grad = None

    _gradients_are_whole = False

    def _held_gradients(self):
        pieces = self.sharded_optimizer.pieces
        return [own.grad for pairs in pieces.values() for _, own in pairs if own.grad is not None]

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _reduce(self, bucket):
        """Launch the reduce_scatter of one bucket; this rank's shard of the average is written in place."""
        flat = self._gradients[bucket]
        if self.reduce_dtype in (None, flat.dtype):
            return self.comm.reduce_scatter(flat, "avg", out=bucket.shard(flat, self.comm.rank), async_op=True,
                                            label=bucket.name)
        return self.comm.reduce_scatter(flat.to(self.reduce_dtype), "avg", async_op=True, label=bucket.name)

    def _reduced(self, bucket, shard):
        """Keep the shard of the average. A shard in `reduce_dtype` is not in the buffer, which is then freed."""
        if shard.dtype != bucket.dtype:
            del self._gradients[bucket]
        self._add(bucket, mark(shard, "gradients"))
        for slot in bucket.slots:
            slot.parameter.grad = None
            self._views.pop(slot.parameter, None)

    def _add(self, bucket, shard):
        """Add `shard` to that of earlier micro-batches."""
        if bucket in self._gradient_shards:
            self._gradient_shards[bucket].add_(shard)
        else:
            self._gradient_shards[bucket] = shard
        self.sharded_optimizer.set_gradients(bucket, self._gradient_shards[bucket], self._bucket_of)

    def _buffer(self, bucket):
        """Return the bucket's buffer. It is reused in each micro-batch, so a shard in it is copied first."""
        shard = self._gradient_shards.get(bucket)
        if bucket in self._gradients and shard is not None and same_memory(
                shard, bucket.shard(self._gradients[bucket], self.comm.rank)):
            self._gradient_shards[bucket] = shard.clone()
            self.sharded_optimizer.set_gradients(bucket, self._gradient_shards[bucket], self._bucket_of)
        return super()._buffer(bucket)

    # --- step --------------------------------------------------------------------------------------------------------

    def _update(self, used):
        """Update this rank's shard of each bucket, then gather all shards, while the next bucket is updated."""
        for bucket in self.buckets:
            for piece, own in self.sharded_optimizer.pieces[bucket]:
                if piece.slot.parameter not in used:
                    own.grad = None
        handles = []
        for bucket, following in zip(self.buckets, [*self.buckets[1:], None], strict=True):
            with self._load_states(bucket, following):
                self.sharded_optimizer.step(bucket, self.shards)
            handles.append(self._after_update(bucket))
        for handle in filter(None, handles):
            handle.wait()

    def _after_update(self, bucket):
        """Launch the all_gather of every rank's shard of the parameters."""
        return self.comm.all_gather(self.shards[bucket], out=self.flat[bucket], async_op=True, label=bucket.name)

    # --- where shards are stored -------------------------------------------------------------------------------------

    def _stored_tensors(self, bucket):
        """Return {key: tensors} that are not used between two updates."""
        return {("states", self.buckets.index(bucket)): self.sharded_optimizer.state_tensors(bucket)}

    def _store_states(self, bucket):
        for key, tensors in self._stored_tensors(bucket).items():
            self.store.put(key, tensors)

    @contextlib.contextmanager
    def _load_states(self, bucket, following=None):
        """Load a bucket's states from the store, and put them back at the end; `following` is prefetched."""
        for key in self._stored_tensors(bucket):
            self.store.get(key)
        for key in self._stored_tensors(following) if following else ():
            self.store.prefetch(key)
        try:
            yield
        finally:
            self._store_states(bucket)

    @contextlib.contextmanager
    def _load_all_states(self):
        with contextlib.ExitStack() as stack:
            for bucket in (*self.buckets, *self.frozen_buckets):
                stack.enter_context(self._load_states(bucket))
            yield

    # --- for saving --------------------------------------------------------------------------------------------------

    def _held_pieces(self):
        return self.sharded_optimizer.pieces

    _owned_pieces = _held_pieces

    def _group_names(self):
        return self.sharded_optimizer.group_names

    def _spread_written(self):
        super()._spread_written()
        for bucket in self.buckets:
            self.sharded_optimizer.set_masters(bucket, self.shards)

    def _after_load(self):
        for bucket in self.buckets:
            self.sharded_optimizer.round_masters(bucket, self.shards)
            handle = self._after_update(bucket)
            if handle is not None:
                handle.wait()
