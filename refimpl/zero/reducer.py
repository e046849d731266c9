"""Reduces gradients over the ranks, bucket by bucket, while backward runs.

Gradients appear from the last layer to the first. As soon as a bucket has all of its gradients, its collective begins,
while backward goes on with the layers before. "PyTorch Distributed" (Li et al. 2020), sections 3.2.2 and 3.2.3.
"""

import contextlib
import itertools
import weakref

import torch

from ..comm.backend.torch_internals import owns_storage
from ..common.marks import mark
from .hybrid import AcrossReplicas
from .internals.in_shards import InShards

SMALL = 2**20  # bytes that may be on the wire of a CPU while it computes


def default_in_flight_bytes(buckets):
    """Return the bytes that are reduced while backward goes on: those of one bucket; on a CPU, where the cores that
    would compute meanwhile are those that send, of two buckets if these are small."""
    there = [bucket.nbytes for bucket in buckets if bucket.device.type != "cpu"]
    return max(there) if there else min(SMALL, 2 * max((bucket.nbytes for bucket in buckets), default=0))


def check_dense(name, gradient):
    """Raise TypeError for a sparse gradient."""
    if gradient.layout is not torch.strided:
        raise TypeError(f"the gradient of {name} is {gradient.layout}: expected a dense one, as nn.Embedding gives "
                        "with sparse=False")


class Reducer:
    """Puts gradients into buckets, and reduces each bucket when it is complete.

    A stage says how: `reduce(bucket)` launches the collective of `flat[bucket]`, and `reduced(bucket, result)` gets its
    result, which `replicas` have averaged before (`hybrid`). A `hook` may reduce in place of the collective (`hook`).
    `in_flight_bytes`: of buckets on the wire while backward goes on. A bucket is whole until its collective ends.
    """

    def __init__(self, buckets, comm, update, dtype=None, replicas=None, hook=None, in_flight_bytes=None):
        self.buckets, self.comm, self.update, self.dtype = buckets, comm, update, dtype
        self.hook = hook
        self.replicas = hook.between(replicas) if replicas and hasattr(hook, "between") else replicas
        self.place = {slot.parameter: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        self.flat, self.views = {}, {}  # bucket → its gradients side by side; parameter → its gradient there
        self.used, self.micro_batches, self.synced = set(), 0, False  # since the last step
        self.missing, self.unlaunched, self.handles = {}, {}, {}
        self.running = self.syncing = False
        self.in_flight_bytes = self.default_in_flight() if in_flight_bytes is None else in_flight_bytes
        # Autograd holds hooks where the collector does not look: one that held this would keep the engine for ever.
        arrived = weakref.WeakMethod(self.arrived)
        for parameter in self.place:
            parameter.register_post_accumulate_grad_hook(lambda parameter: arrived() and arrived()(parameter))

    def default_in_flight(self):
        """Return the bytes that are reduced while backward goes on."""
        return default_in_flight_bytes(self.buckets)

    @property
    def hooked(self):
        """Tell whether the hook reduces in this step."""
        return self.hook is not None and self.hook.active

    def by_hook(self, collective, bucket):
        """Let the hook launch a collective of one bucket, "all_reduce" or "reduce_scatter"."""
        flat = self.flat[bucket]
        handle = getattr(self.hook, collective)(self.buckets.index(bucket), flat, self.dtype or flat.dtype, bucket.name)
        del flat
        if getattr(self.hook, "encodes", False):
            self.encoded(bucket)
            handle.begin()
        return handle

    def encoded(self, bucket):
        """No-op: a bucket's gradients have been encoded, and `flat` is not read any more. Later stages free it."""

    @contextlib.contextmanager
    def reducing(self, syncing):
        """Collect the gradients of a backward that runs in this context, and reduce them if `syncing`. An exception
        leaves no gradient and no collective behind."""
        self.begin(syncing)
        try:
            yield
            self.finish()
            self.micro_batches, self.synced = self.micro_batches + 1, syncing
        except BaseException:
            while self.handles:  # other ranks are in these collectives: each that has begun ends
                self.handles.popitem()[1].wait()
            self.drop()
            raise
        finally:
            self.running = False

    def begin(self, syncing):
        """Begin a backward. Each bucket waits for the gradients of all of its parameters."""
        self.missing = {bucket: set(bucket.parameters) for bucket in self.buckets}
        self.unlaunched, self.syncing, self.running = dict.fromkeys(self.buckets if syncing else ()), syncing, True

    def arrived(self, parameter):
        """Put a complete gradient into its bucket. Autograd calls this hook once for each parameter in a backward."""
        bucket, slot = self.place[parameter]
        if not self.running:
            self.drop()  # they are of this rank alone
            raise RuntimeError("loss.backward() by itself reduces nothing: call engine.backward(loss)")
        if self.syncing and bucket not in self.unlaunched:
            raise RuntimeError(f"{slot.name} got a gradient again after its bucket was reduced, as when two reentrant "
                               "recomputations use it: recompute with use_reentrant=False")
        self.accept_gradient(parameter)
        self.used.add(parameter)
        self.missing[bucket].discard(parameter)
        self.launch_ready()

    def accept_gradient(self, parameter):
        """Move a parameter's gradient to its bucket's buffer, where autograd adds to it from then on."""
        if parameter.grad is not self.views.get(parameter):  # else autograd has added to the view, in place
            parameter.grad = self.views[parameter] = self.move_to_bucket(parameter, parameter.grad)

    def accept_all_gradients(self):
        """Move all gradients to their buckets, which are then complete."""
        for parameter in self.place:
            if parameter.grad is not None:
                self.arrived(parameter)

    def move_to_bucket(self, parameter, gradient):
        """Return the gradient in its bucket's buffer; one that fills the bucket alone becomes the buffer."""
        bucket, slot = self.place[parameter]
        check_dense(slot.name, gradient)
        # The collective writes into the buffer, so nobody else may hold a gradient that becomes it.
        if (bucket not in self.flat and gradient.numel() == bucket.numel and gradient.is_contiguous()
                and not slot.order and gradient.dtype == self.buffer_dtype(bucket) and owns_storage(gradient)):
            self.flat[bucket] = mark(gradient, "gradients").view(-1)
            return gradient
        return slot.view(self.buffer(bucket)).copy_(gradient)

    def buffer(self, bucket):
        """Return the bucket's buffer of gradients. Only the parts that are in `views` have been written."""
        if bucket not in self.flat:
            flat = torch.empty(bucket.numel, dtype=self.buffer_dtype(bucket), device=bucket.device)
            self.flat[bucket] = mark(flat, "gradients")
            bucket.clear_padding(flat)
        return self.flat[bucket]

    def buffer_dtype(self, bucket):
        """Return the dtype in which gradients wait for their reduction."""
        return bucket.dtype

    def launch_ready(self):
        """Launch complete buckets, in the order of `buckets`, which is the same on all ranks."""
        for bucket in list(itertools.takewhile(lambda bucket: not self.missing[bucket], self.unlaunched)):
            self.launch(bucket)

    def launch(self, bucket):
        """Launch a bucket's collective; a parameter without a gradient on this rank has zeros."""
        self.wait_until(self.in_flight_bytes - bucket.nbytes)
        del self.unlaunched[bucket]
        for slot in bucket.slots:
            if slot.parameter not in self.views:  # this rank has not used it
                self.views[slot.parameter] = slot.view(self.buffer(bucket)).zero_()  # ranks send equal bytes
        handle = self.reduce(bucket)
        for earlier in self.handles.values() if self.replicas else ():  # a bucket later: theirs has had time to end
            earlier.launch_across()
        self.handles[bucket] = AcrossReplicas(handle, self.replicas, bucket.name) if self.replicas else handle
        self.wait_until(self.in_flight_bytes)

    def finish(self):
        """End a backward: launch buckets with parameters that were not used, and wait for all results."""
        for bucket in list(self.unlaunched):
            self.launch(bucket)
        self.wait_until(0)

    def wait_until(self, most):
        """Wait for reductions, the oldest first, until at most so many bytes of buckets are on the wire."""
        while self.handles and sum(bucket.nbytes for bucket in self.handles) > most:
            bucket = next(iter(self.handles))  # the oldest: collectives end in the order in which they began
            self.reduced(bucket, self.handles.pop(bucket).wait())

    def drop(self):
        """Drop all gradients."""
        for parameter in self.place:
            parameter.grad = None
        self.flat.clear(), self.views.clear(), self.used.clear()
        self.micro_batches, self.synced = 0, False
        for bucket in self.buckets:
            self.update.drop_gradients(bucket)
        if self.hook is not None:
            self.hook.drop()

    def check_reduced(self):
        """Raise RuntimeError unless there are gradients, averaged over all ranks."""
        if not self.micro_batches:
            raise RuntimeError("step without gradients: call engine.backward(loss) first")
        if not self.synced:
            raise RuntimeError("the last backward was in no_sync, so each rank has gradients of its own: leave "
                               "no_sync before the last micro-batch")


# --- ZeRO: in shards -------------------------------------------------------------------------------------------------


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
                self.update.copy_gradients(bucket)  # the shard is a view of the buffer that is freed below
            self.flat.clear()  # their gradients are in shards: the next micro-batch fills buffers anew
        super().begin(syncing)

    def reduce(self, bucket):
        """Launch the reduce_scatter of one bucket; this rank's shard of the average is written in place."""
        if self.hooked:
            return self.by_hook("reduce_scatter", bucket)
        flat = self.flat[bucket]
        if self.dtype in (None, flat.dtype):
            # in place: the shard is a part of the whole, which stays until the step anyway
            return self.comm.reduce_scatter(flat, "avg", out=bucket.shard(flat, self.comm.rank), async_op=True,
                                            label=bucket.name)
        return self.comm.reduce_scatter(flat.to(self.dtype), "avg", async_op=True, label=bucket.name)

    def reduced(self, bucket, shard):
        """Keep the shard of the average. If it is in another dtype, or from a hook, the buffer is freed."""
        if self.hooked or shard.dtype != bucket.dtype:
            del self.flat[bucket]
        self.keep_shard(bucket, shard)

    def keep_shard(self, bucket, shard):
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
                parameter.grad = stand_in  # None would let torch's clip_grad_norm_ clip nothing


class ReduceScatterAtOnce(ReduceScatter):
    """Frees whole gradients as soon as they are reduced."""

    def accept_gradient(self, parameter):
        """Move the gradient to its bucket's buffer; `parameter.grad` is None again."""
        gradient, parameter.grad = parameter.grad, None
        if parameter in self.views:  # used twice: by two recomputations
            self.views[parameter].add_(gradient)
        else:
            self.views[parameter] = self.move_to_bucket(parameter, gradient)

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
        self.keep_shard(bucket, shard)

    def encoded(self, bucket):
        """Free the whole gradients: nobody reads them any more."""
        self.flat.pop(bucket, None)
        for slot in bucket.slots:
            self.views.pop(slot.parameter, None)
