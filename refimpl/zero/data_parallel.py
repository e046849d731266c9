"""Data parallelism: every rank holds the whole model and its own part of the batch; gradients are averaged.

    g = (1/N) Σ_r g_r          all_reduce, one bucket at a time: 2(N−1)/N · Ψ elements from each rank

The loss is a mean, so the average over ranks of the gradients of equal parts is the gradient of the whole. `reducer`
says when a bucket is reduced.

Bytes of model states on each rank, Ψ parameters in fp32 with Adam: 4Ψ + 4Ψ + 8Ψ. Nothing is saved yet; the three files
that follow take away one of the three terms each.
"""

import contextlib

from .bucket import Piece
from .engine import Engine
from .reducer import Reducer


class AllReduce(Reducer):
    """Averages whole gradients, in place: `parameter.grad` is a view of its bucket's buffer."""

    def default_in_flight(self):
        """Return the bytes of two buckets: gradients stay whole, so that waiting frees copies alone."""
        return 2 * max((bucket.nbytes for bucket in self.buckets), default=0)

    def reduce(self, bucket):
        """Launch the all_reduce that averages one bucket."""
        if self.hooked:
            return self.by_hook("all_reduce", bucket)
        flat = self.flat[bucket]
        if self.dtype in (None, flat.dtype):
            # in place: the average takes no bytes of its own
            return self.comm.all_reduce(flat, "avg", out=flat, async_op=True, label=bucket.name)
        return self.comm.all_reduce(flat.to(self.dtype), "avg", async_op=True, label=bucket.name)

    def reduced(self, bucket, average):
        """Let each `parameter.grad` be the average, also if only another rank has used the parameter."""
        if average is not self.flat[bucket]:
            self.flat[bucket].copy_(average)  # back in the gradients' own dtype
        for slot in bucket.slots:
            slot.parameter.grad = self.views[slot.parameter]


class WholeUpdate:
    """The caller's optimizer, which updates all whole parameters, on every rank alike."""

    masters = {}

    def __init__(self, buckets, shards, rank, optimizer, groups, named, stored):
        self._names = {p: name for name, p in named}
        self.optimizer = optimizer([p for _, p in named] if groups is None else groups(named))
        self.pieces = {bucket: [(Piece(slot, 0, slot.end - slot.first, slot.first), slot.parameter)
                                for slot in bucket.slots] for bucket in buckets}

    @property
    def group_names(self):
        """Return [names of the parameters] of each param group."""
        return [[self._names[p] for p in group["params"]] for group in self.optimizer.param_groups]

    def step(self, used, updated):
        """Update the parameters that are `used`: the optimizer must not change one that no rank has used."""
        for pairs in self.pieces.values():
            for _, parameter in pairs:
                if parameter not in used:
                    parameter.grad = None  # a gradient of zeros would still let AdamW decay it
        self.optimizer.step()

    def with_gradients(self):
        """Yield (bucket, pieces) of all buckets."""
        return self.pieces.items()

    def loaded(self, bucket):
        """No-op: everything is here."""
        return contextlib.nullcontext()

    def drop_gradients(self, bucket):
        """No-op: they are `parameter.grad`, which the reducer drops."""


class DataParallel(Engine):
    """Trains a model: `engine.forward(…)`, `engine.backward(loss)` and `engine.step()` replace calls of the model, the
    loss and the optimizer.

    - `model`: the same on every rank. Rank 0's parameters and buffers are broadcast, once; parameters move to buckets.
    - `optimizer`: makes one from an iterable of parameters, or of groups: `partial(torch.optim.AdamW, lr=1e-3)`. Stages
      1 to 3 call it some times more, to try it on small tensors, at the start and along with each step (`internals`);
      TypeError or RuntimeError for one that cannot take pieces.
    - `groups`: for several param groups, a function of the named parameters that returns a list of dicts as torch takes
      them; by default all parameters are in one group.
    - `bucket_bytes`: bytes of gradients that one collective moves; a larger tensor has a bucket of its own. By default
      25 MiB; from stage 1 on a sixteenth of all gradients, from 1 to 25 MiB.
    - `in_flight_bytes`: bytes of buckets that may be on the wire while backward goes on to the next ones. By default
      those of the two largest here, where gradients stay whole anyway. From stage 1 on it is one bucket on a GPU; on a
      CPU, whose cores both compute and send, it is two buckets, but 1 MiB at the most.
    - `reduce_dtype`: the dtype in which gradients are sent and averaged; by default their own.
    - `world`: the Communicator of all ranks that hold a part of the model, if tensor or pipeline parallelism has split
      it before: `comm` has the ranks with the same part, and `sharding.set_spec` has said which part each parameter
      is. Norms are over all of `world`, and it saves together. By default `comm`.
    - `hook`: what reduces gradients in place of a collective, such as a GradientCompressor (`hook`); TypeError at
      stages 2 and 3 for one that needs whole gradients.

    With `refimpl.mesh`, `comm` is mesh.get_parallel_group("dp"); with context parallelism it is that of ("dp", "cp"),
    whose ranks have different tokens, and `accumulate(engine, …)` divides by the tokens of all of them.

    The engine can stand where an optimizer is expected, by schedules of lr and loss scalers. A scaler has to ask all
    ranks: AdaptiveLossScaler(comm=comm), or at stage 0 torch's GradScaler, which leaves the gradients of a step that it
    skips: call `zero_grad`. CollectiveMismatch names ranks with another model, or in another micro-batch. An exception
    in backward leaves no gradient and no collective behind, so that all ranks can try the step again.
    """

    stage, reducer_type, update_type = 0, AllReduce, WholeUpdate
