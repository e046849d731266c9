"""ZeRO stage 3: parameters, too, are kept in shards, and are whole only while a module computes with them.

A unit is a module whose parameters are gathered and released together, by default each block of the model. Its bucket
is gathered before its forward, released after it, gathered again before its backward, and released when its gradients
are there:

    all_gather for forward      (N−1)/N · Ψ
    all_gather for backward     (N−1)/N · Ψ
    reduce_scatter              (N−1)/N · Ψ          3Ψ in all, half as much again as data parallelism

Bytes with Adam in fp32: (4Ψ + 4Ψ + 8Ψ)/N and the units that are whole at the moment. "ZeRO" (Rajbhandari et al. 2020),
sections 5.3 and 7.2.2.

A parameter is released by resizing its storage to no bytes. What autograd saved of it, a transposed view of a weight,
is in that storage and comes back with it; a new tensor in `parameter.data` would leave the old one alive in that view.
"""

import contextlib

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ..memory import mark
from .backwards import Backwards, is_opaque
from .gathering import Gathering
from .internals.consistency import check_phase
from .internals.sharded_optimizer import ShardedOptimizer
from .starting import start
from .units import default_units, frozen_buckets, modules_of_units, parameters_of_units, unit_buckets
from .zero2 import Zero2

LOOK_AHEAD = 50_000_000  # elements


class Zero3(Zero2):
    """`Zero2` that keeps parameters in shards: same arguments, same numbers, and

    - `units`: modules whose parameters are gathered together; by default the elements of each `nn.ModuleList`, and
      every other module that has parameters of its own. A unit does not gather blocks that it holds in a list.
    - `look_ahead`: elements that are prefetched before their unit computes, in the order of the last step.
    - `max_live_parameters`: nothing is prefetched beyond so many elements that are whole.
    - `persistence_threshold`: parameters of fewer elements stay whole; for the optimizer they are in shards.
    - `initialize`: how a model on the meta device gets its values, unit by unit, so that it never exists whole: by
      default each module's `reset_parameters()`; a function of a module that is called after it, as by `model.apply`;
      or the path of a safetensors file (or of the index of several), of which a rank reads its part.
    - `reshard_after_forward`: False keeps units whole from forward to backward: 2Ψ on the wire, and Ψ in memory.

    Outside of forward and backward the model's parameters are released: they read as NaN, and torch refuses or loses
    what is written to them. `with engine.gathered():` gathers them for a while.
    RuntimeError in backward names a parameter that a forward read although no unit that holds it was called.
    """

    stage = 3

    def __init__(self, model, comm, *args, units=None, look_ahead=LOOK_AHEAD, max_live_parameters=10**9,
                 persistence_threshold=0, initialize=None, reshard_after_forward=True, **options):
        self.units = default_units(model) if units is None else list(dict.fromkeys(units))
        self.persistence_threshold, self.reshard_after_forward = persistence_threshold, reshard_after_forward
        self._limits = look_ahead, max_live_parameters
        self._backwards = Backwards(self._backward_begun, self._backward_ended)
        self._start = start(model, comm.device, initialize)
        super().__init__(model, comm, *args, **options)
        self._accumulators = {p: torch.autograd.graph.get_gradient_edge(p).node for p in self._bucket_of}
        self._gathered_once = set()  # buckets that some forward has gathered
        before, after = map(torch.compiler.disable, (self._before_forward, self._after_forward))  # they resize storages
        for unit in self.units:
            unit.register_forward_pre_hook(before, prepend=True)  # before hooks that read parameters
            unit.register_forward_hook(after, always_call=True)

    def forward(self, *args, **kwargs):
        """Return the model's output. All ranks call it together, and run the same units in the same order, in backward
        too. A unit returns tensors, tuples, lists, dicts or dataclasses: TypeError for an object of another kind."""
        check_phase(self.comm, "forward", self._steps, self._micro_batches)
        self.gathering.release_unused()
        self._backwards.evaluating, backward_follows = not torch.is_grad_enabled(), False
        try:
            output = self.model(*args, **kwargs)
            backward_follows = torch.is_grad_enabled()
            return output
        finally:
            self._backwards.evaluating = False
            if not backward_follows:
                self.gathering.release_unused()

    __call__ = forward

    @contextlib.contextmanager
    def gathered(self, write=False):
        """Gather all parameters, to be read. What is written to them is lost, unless `write`: then rank 0's values are
        those of all ranks when the context ends, of shards and masters too. All ranks call it."""
        sharded = [bucket for bucket in self.full if not self._is_persistent(bucket)]
        for bucket in sharded:
            self.gathering.gather(bucket)
        try:
            with super().gathered(write):
                yield
        finally:
            for bucket in sharded:
                self.gathering.release(bucket)
            self.gathering.release_unused()

    # --- where parameters are ----------------------------------------------------------------------------------------

    def _lay_out(self, named, bucket_bytes):
        buckets = unit_buckets(named, self.units, self.comm.world_size, self.persistence_threshold)
        self.frozen_buckets = frozen_buckets(self.model, self.units, self.comm.world_size, self.persistence_threshold)
        place = {slot.parameter: bucket for bucket in (*buckets, *self.frozen_buckets) for slot in bucket.slots}
        self._buckets_of_unit = {unit: list(dict.fromkeys(place[p] for p in parameters if p in place))
                                 for unit, parameters in parameters_of_units(self.units).items()}
        self._units_of_bucket = {bucket: [unit for unit, its in self._buckets_of_unit.items() if bucket in its]
                                 for bucket in buckets}
        return buckets

    def _hold_parameters(self):
        """Keep this rank's shard of each bucket; parameters become views of a tensor with bytes only while gathered."""
        self.shards, self.full = {}, {}
        self.gathering = Gathering(self.comm, self.shards, self.full, *self._limits, self.store)
        modules, in_buckets = modules_of_units(self.units), {p for buckets in (self.buckets, self.frozen_buckets)
                                                             for bucket in buckets for p in bucket.parameters}
        if self._start:
            self._start.make_whole([p for p in self.model.parameters() if p not in in_buckets])
        for unit, buckets in self._buckets_of_unit.items():
            for bucket in buckets:
                self._make_whole(bucket)
            if self._start:
                self._start.fill(modules[unit])
            for bucket in buckets:
                self._cut(bucket)
        if self._start:
            self._start.finish()
        self._broadcast_rest()

    def _make_whole(self, bucket):
        """Put all parameters of a bucket side by side; again, if an earlier unit has some of them, too."""
        if bucket not in self.full:
            full = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            for slot, view in zip(bucket.slots, bucket.views(mark(full, "parameters")), strict=True):
                view.copy_(slot.parameter.detach())
                slot.parameter.data = view
            self.full[bucket] = full
            if self._start and not self._start.reads_shards_of(bucket):
                self._start.read_whole(bucket)
        elif self._start and not self._start.reads_shards_of(bucket) and not self._is_persistent(bucket):
            self.gathering.fetch(bucket)

    def _cut(self, bucket):
        """Keep this rank's shard of a bucket, as rank 0 has the whole or as a file has it, and release the whole."""
        full, rank, persistent = self.full[bucket], self.comm.rank, self._is_persistent(bucket)
        if not full.untyped_storage().nbytes() and full.numel():
            return  # an earlier unit's
        if bucket not in self.shards:
            self.shards[bucket] = mark(torch.zeros(bucket.shard_numel, dtype=bucket.dtype, device=bucket.device),
                                       "parameters")
        if self._start and self._start.reads_shards_of(bucket):
            self._start.read(bucket.pieces(rank), self.shards[bucket])
            if persistent:
                self.comm.all_gather(self.shards[bucket], out=full, label=bucket.name)
        else:
            self.comm.broadcast(full, 0, out=full, label=bucket.name)
            self.shards[bucket].copy_(bucket.shard(full, rank))
        if not persistent:
            self.gathering.hide(bucket)

    def _is_persistent(self, bucket):
        return all(slot.parameter.numel() < self.persistence_threshold for slot in bucket.slots)

    def _make_optimizer(self, optimizer, groups, named):
        self._gradient_shards = {}
        self.sharded_optimizer = ShardedOptimizer(self.buckets, self.shards, self.comm.rank, optimizer, groups, named)
        return self.sharded_optimizer.optimizer

    def _update(self, used):
        self.gathering.release_all()  # what a forward without a backward has left whole
        super()._update(used)

    def _after_update(self, bucket):
        """Launch the all_gather of a bucket that stays whole; others are gathered when a unit computes."""
        if not self._is_persistent(bucket):
            return None
        return self.comm.all_gather(self.shards[bucket], out=self.full[bucket], async_op=True, label=bucket.name)

    def _stored_tensors(self, bucket):
        shard = {} if self._is_persistent(bucket) else {self.gathering.key(bucket): [self.shards[bucket]]}
        return shard if bucket in self.frozen_buckets else super()._stored_tensors(bucket) | shard

    @torch.no_grad()
    def _spread_written(self):
        for bucket, full in self.full.items():
            self.comm.broadcast(full, 0, out=full, label=bucket.name)
            self.shards[bucket].copy_(bucket.shard(full, self.comm.rank))
        for bucket in self.buckets:
            self.sharded_optimizer.set_masters(bucket, self.shards)
        self._broadcast_rest()

    def _after_load(self):
        self._release_all()
        super()._after_load()

    # --- around each unit --------------------------------------------------------------------------------------------

    def _sharded_buckets(self, unit):
        return [bucket for bucket in self._buckets_of_unit[unit] if not self._is_persistent(bucket)]

    def _trained_buckets(self, unit):
        return [bucket for bucket in self._buckets_of_unit[unit] if bucket in self._missing]

    def _before_forward(self, unit, args):
        self._backwards.enter(unit, self._running)
        for bucket in self._sharded_buckets(unit):
            self._gathered_once.add(bucket)
            self.gathering.gather(bucket)

    def _after_forward(self, unit, args, output):
        backward_follows = self._backwards.leave(output, self._running)
        if not backward_follows and torch.is_grad_enabled() and not self._running and is_opaque(output):
            raise TypeError(f"{type(unit).__name__}, a unit, returned {type(output).__name__}, in which no tensor can "
                            "be found: return tensors, tuples, lists, dicts or dataclasses")
        if self.reshard_after_forward or not backward_follows or self._running:
            for bucket in self._sharded_buckets(unit):
                self.gathering.release(bucket)

    def backward(self, loss):
        """Compute gradients as `Zero2.backward` does. RuntimeError names a parameter that was read while it was
        released, since no unit that holds it was called; of frozen ones, which get no gradients, if the loss is NaN."""
        away = [bucket.slots[0].name for bucket in self.frozen_buckets if bucket not in self._gathered_once]
        if away and not isinstance(loss, FakeTensor) and loss.isnan().any():
            self._refuse(" or ".join(away))
        super().backward(loss)

    def _arrived(self, parameter):
        bucket = self._bucket_of[parameter]
        if bucket not in self._gathered_once and not self._is_persistent(bucket):
            self._refuse(self._slot_of[parameter].name)
        super()._arrived(parameter)

    @staticmethod
    def _refuse(name):
        raise RuntimeError(f"{name} was read while it was released, as NaN: no unit that holds it was called. Name in "
                           "`units` the module whose forward reads it")

    def _backward_begun(self, unit):
        """Gather a unit for its backward, and note which of its parameters get a gradient from it on this rank."""
        if not self._running:
            raise RuntimeError("loss.backward() by itself reduces nothing: call engine.backward(loss). "
                               "(torch.autograd.grad and double backward need stage 0 to 2)")
        for bucket in self._trained_buckets(unit):
            self._missing[bucket].update(slot.parameter for slot in bucket.slots
                                         if torch._C._will_engine_execute_node(self._accumulators[slot.parameter]))
        if type(unit) is not nn.Embedding:  # its backward does not read the weight
            for bucket in self._sharded_buckets(unit):
                self.gathering.gather(bucket)

    def _backward_ended(self, unit):
        """Release a unit, and reduce its gradients, with zeros for parameters that this rank has not used: so all ranks
        reduce at the same place between their gathers, whatever they used inside the unit."""
        for bucket in self._sharded_buckets(unit) if type(unit) is not nn.Embedding else ():
            self.gathering.release(bucket)
        for bucket in self._trained_buckets(unit):
            if bucket in self._unlaunched and not self._missing[bucket] and not any(
                    map(self._backwards.is_recomputed_later, self._units_of_bucket[bucket])):
                self._launch(bucket)

    def _awaited(self, bucket):
        return set()  # `_backward_begun` adds parameters, unit by unit

    def _launch_ready(self):
        """No-op: a unit's gradients are reduced when its backward has ended."""

    def _finish(self):
        self._backwards.end_all()
        super()._finish()
        self._release_all()

    def _abandon(self):
        super()._abandon()
        self._release_all()

    def _release_all(self):
        self._backwards.drop()
        self.gathering.end_step()

    def zero_grad(self, set_to_none=True):
        """Drop the gradients; `step` has done so."""
        super().zero_grad()
        self._backwards.forget()
