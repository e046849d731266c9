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
from .pieces import Pieces
from .store import DeviceMemory


class Zero1(DataParallel):
    """`DataParallel` with the optimizer's state in shards: same arguments, same numbers, 2Ψ on the wire.

    Parameters of 16 bits have an fp32 master, in shards too. The optimizer has to treat each element by itself, as
    Adam and SGD do. `no_sync` as before: gradients are whole until they are reduced, in the last micro-batch.
    `store`: where shards rest while nothing computes with them, a `ShardStore`; by default where they are.
    """

    stage = 1

    def __init__(self, *args, store=None, **options):
        self.store = DeviceMemory() if store is None else store
        super().__init__(*args, **options)
        for bucket in self.buckets:
            self._rest(bucket)

    def _make_optimizer(self, optimizer, groups, named):
        self.shards = {bucket: bucket.shard(self.flat[bucket], self.comm.rank) for bucket in self.buckets}
        self._gradient_shards = {}
        self.pieces = Pieces(self.buckets, self.shards, self.comm.rank, optimizer, groups, named)
        return self.pieces.optimizer

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        self._gradient_shards.clear()
        for group in self.param_groups:
            for own in group["params"]:
                own.grad = None

    _gradients_are_whole = False

    def _held_gradients(self):
        return [own.grad for pairs in self.pieces.of.values() for _, own in pairs if own.grad is not None]

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _reduce(self, bucket):
        """Begin to average one bucket; of the result this rank gets its shard, in place."""
        flat = self._gradients[bucket]
        if self.reduce_dtype in (None, flat.dtype):
            return self.comm.reduce_scatter(flat, "avg", out=bucket.shard(flat, self.comm.rank), async_op=True)
        return self.comm.reduce_scatter(flat.to(self.reduce_dtype), "avg", async_op=True)

    def _reduced(self, bucket, shard):
        """The rest of the buffer has done its work; it goes if the shard, in `reduce_dtype`, is not in it."""
        if shard.dtype != bucket.dtype:
            del self._gradients[bucket]
        self._add(bucket, mark(shard, "gradients"))
        for slot in bucket.slots:
            slot.parameter.grad = None
            self._views.pop(slot.parameter, None)

    def _add(self, bucket, shard):
        """To what earlier micro-batches have left."""
        if bucket in self._gradient_shards:
            self._gradient_shards[bucket].add_(shard)
        else:
            self._gradient_shards[bucket] = shard
        self.pieces.give(bucket, self._gradient_shards[bucket], self._bucket_of)

    def _buffer(self, bucket):
        """For a micro-batch after one that was reduced the buffer is used again."""
        shard = self._gradient_shards.get(bucket)
        if bucket in self._gradients and shard is not None and same_memory(
                shard, bucket.shard(self._gradients[bucket], self.comm.rank)):
            self._gradient_shards[bucket] = shard.clone()
            self.pieces.give(bucket, self._gradient_shards[bucket], self._bucket_of)
        return super()._buffer(bucket)


    # --- step --------------------------------------------------------------------------------------------------------

    def _update(self, used):
        """Each bucket: update this rank's shard, then gather all; the next bucket's update goes on meanwhile."""
        for bucket in self.buckets:
            for piece, own in self.pieces.of[bucket]:
                if piece.slot.parameter not in used:
                    own.grad = None
        handles = []
        for bucket, following in zip(self.buckets, [*self.buckets[1:], None], strict=True):
            with self._here(bucket, following):
                self.pieces.step(bucket, self.shards)
            handles.append(self._after_update(bucket))
        for handle in filter(None, handles):
            handle.wait()

    def _after_update(self, bucket):
        """Begin to bring every rank's shard of the parameters to all."""
        return self.comm.all_gather(self.shards[bucket], out=self.flat[bucket], async_op=True)

    # --- where shards rest -------------------------------------------------------------------------------------------

    def _resting(self, bucket):
        """{key: tensors} of what nothing computes with between two updates."""
        return {("states", self.buckets.index(bucket)): self.pieces.states(bucket)}

    def _rest(self, bucket):
        for key, tensors in self._resting(bucket).items():
            self.store.put(key, tensors)

    @contextlib.contextmanager
    def _here(self, bucket, following=None):
        """A bucket's shards where they can be computed with; `following` is the next one that will be asked for."""
        for key in self._resting(bucket):
            self.store.get(key)
        for key in self._resting(following) if following else ():
            self.store.begin(key)
        try:
            yield
        finally:
            self._rest(bucket)

    @contextlib.contextmanager
    def _all_here(self):
        with contextlib.ExitStack() as stack:
            for bucket in self.buckets:
                stack.enter_context(self._here(bucket))
            yield

    # --- for checkpoints ---------------------------------------------------------------------------------------------

    def _held(self):
        return self.pieces.of

    _shared_out = _held

    def _members(self):
        return self.pieces.members

    def _loaded(self):
        for bucket in self.buckets:
            self.pieces.round(bucket, self.shards)
            handle = self._after_update(bucket)
            if handle is not None:
                handle.wait()
