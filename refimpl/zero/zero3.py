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
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .internals.backwards import Backwards, is_opaque
from .internals.initializers import initializer_of
from .quantized.gather import check_codec, quantized_gather
from .reducer import ReduceScatterAtOnce, check_dense
from .sharded_parameters import ShardedParameters, is_persistent
from .units import default_units, reads_weights_in_backward
from .zero2 import Zero2

if TYPE_CHECKING:
    from ..comm.communicator import Communicator
    from .gathering import Gathering

LOOK_AHEAD, MOST_AHEAD = 1, 10_000  # units; above, someone means elements


class ReduceByUnit(ReduceScatterAtOnce):
    """Reduces a bucket when the backward of its unit has ended, with zeros for parameters that this rank has not used:
    so all ranks reduce at the same place between their gathers, whatever they used inside the unit. Gradients stay
    where autograd has made them until then: the bucket's buffer comes when the unit's parameters have gone."""

    def accept_gradient(self, parameter):
        """Leave the gradient where autograd has made it; `launch` moves it to the bucket."""
        check_dense(self.place[parameter][1].name, parameter.grad)

    def launch(self, bucket):
        """Move the bucket's gradients to its buffer, and launch its collective."""
        self.wait_until(self.in_flight_bytes - bucket.nbytes)  # before it takes bytes itself
        for slot in bucket.slots:
            gradient, slot.parameter.grad = slot.parameter.grad, None
            if gradient is not None:
                self.views[slot.parameter] = self.move_to_bucket(slot.parameter, gradient)
            del gradient
        super().launch(bucket)

    def begin(self, syncing):
        """Begin a backward. `Zero3._backward_begun` adds what buckets wait for, unit by unit."""
        super().begin(syncing)
        self.missing = {bucket: set() for bucket in self.buckets}

    def launch_ready(self):
        """No-op: `Zero3._backward_ended` launches."""


class Zero3(Zero2):
    """`Zero2` that keeps parameters in shards: same arguments, same numbers, and

    - `units`: modules whose parameters are gathered together, in any order; by default the blocks that repeat in the
      model (`units.blocks`), and every other module that has parameters of its own. A unit does not gather blocks that
      it holds.
    - `look_ahead`: units that are gathered ahead while one computes, in the order in which the last step used them.
    - `max_live_parameters`: nothing is prefetched beyond so many elements that are whole.
    - `persistence_threshold`: parameters of fewer elements stay whole; for the optimizer they are in shards.
    - `initialize`: how a model on the meta device gets its values, unit by unit, so that it never exists whole: by
      default each module's `reset_parameters()`; a function of a module that is called after it, as by `model.apply`;
      or the path of a safetensors file (or of the index of several), of which a rank reads its part.
    - `reshard_after_forward`: False keeps units whole from forward to backward: 2Ψ on the wire, and Ψ in memory.
    - `quantized_weights`: a `BlockCodec` in which units are gathered, of `quantized`; by default they travel as they
      are. Shards stay exact, and so does what `gathered` shows. For gradients: `hook=QuantizedReduce()`.

    A parameter that a forward reads outside of its unit, as a tied head by `F.linear(x, self.embedding.weight)`, is
    gathered there, and stays whole until backward has ended. What no gather can serve is refused in the first step
    (`internals.released`). Outside of forward and backward RuntimeError names what is
    read or written; `with engine.gathered():` makes parameters whole for a while.
    """

    stage, reducer_type = 3, ReduceByUnit

    def __init__(self, model: torch.nn.Module, comm: "Communicator", *args: Any,
                 units: Iterable[torch.nn.Module] | Callable[..., Iterable[torch.nn.Module]] | None = None,
                 look_ahead: int = LOOK_AHEAD, max_live_parameters: int = 10**9, persistence_threshold: int = 0,
                 initialize: Callable[[torch.nn.Module], Any] | None = None, reshard_after_forward: bool = True,
                 quantized_weights: Any = None, **options: Any) -> None:
        check_codec(comm, quantized_weights)  # another codec would read other ranks' payloads wrongly
        if not isinstance(look_ahead, int) or not 0 <= look_ahead <= MOST_AHEAD:
            raise ValueError(f"look_ahead={look_ahead}: expected a number of units from 0 on, not of elements; with 1 "
                             "the next is gathered while one computes")
        self.units = default_units(model) if units is None else list(dict.fromkeys(units))
        self.persistence_threshold, self.reshard_after_forward = persistence_threshold, reshard_after_forward
        self._limits, self._codec = (look_ahead, max_live_parameters), quantized_weights
        self._backwards = Backwards(self._backward_begun, self._backward_ended)
        self._initializer = initializer_of(model, comm.device, initialize)
        # a store, or the host, has the masters elsewhere: then a 16-bit shard is gathered
        self._in_fp32 = options.get("store") is None and options.get("update") is None
        super().__init__(model, comm, *args, **options)
        self.gathering.writes = self.writes
        with torch._C.DisableTorchFunctionSubclass():  # which would see reads of what is released
            self._accumulators = {p: torch.autograd.graph.get_gradient_edge(p).node for p in self.reducer.place}
        before, after = map(torch.compiler.disable, (self._before_forward, self._after_forward))  # they resize storages
        for unit in self.units:
            unit.register_forward_pre_hook(before, prepend=True)  # before hooks that read parameters
            unit.register_forward_hook(after, always_call=True)  # also if the forward raises: nothing stays whole

    def _lay_out(self, named, bucket_bytes):
        self.parameters = ShardedParameters(self.model, self.levels, named, self.units, self.persistence_threshold,
                                            self._initializer)
        return self.parameters.trained, self.parameters.frozen

    def _make_parameters(self):
        quantized = quantized_gather(self.levels.shards, self._codec)
        # `parameters.sharded(unit)`: a unit's buckets that are not persistent. `updated` does not gather these: the
        # next forward does.
        self.parameters.materialize(self._stored, *self._limits, in_fp32=self._in_fp32)
        self.gathering.quantized = quantized  # from the first forward on

    @property
    def gathering(self) -> "Gathering":
        """Return the Gathering of this rank's whole parameters."""
        return self.parameters.gathering

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output. All ranks call it together, and run the same units in the same order, in backward
        too. A unit returns tensors, tuples, lists, dicts or dataclasses: TypeError for an object of another kind."""
        self.check_phase("forward")
        self.gathering.release_unused()
        self._backwards.forward_begins()
        self._backwards.evaluating, backward_follows = not torch.is_grad_enabled(), False
        self.gathering.computing, held = self.gathering.computing + 1, set(self.gathering.kept_for_outside)
        try:
            with self._unread():
                output = self.model(*args, **kwargs)
            backward_follows = torch.is_grad_enabled()
            return output
        finally:
            self._backwards.evaluating = False  # also if it raises
            self.gathering.computing -= 1
            if not backward_follows:
                self.gathering.release_kept(held)
                self.gathering.release_unused()

    @contextlib.contextmanager
    def gathered(self, write: bool = False) -> Iterator[None]:
        """Gather all parameters, to be read. What is written to them is lost, unless `write`: then rank 0's values are
        those of all ranks when the context ends, of shards and masters too. All ranks call it."""
        sharded = [bucket for bucket in self.parameters.whole if not is_persistent(bucket, self.persistence_threshold)]
        self.gathering.keep_written()
        with self.gathering.exact():
            for bucket in sharded:
                self.gathering.gather(bucket)
            try:
                with super().gathered(write):
                    yield
            finally:
                self.gathering.see(sharded)
                for bucket in sharded:
                    self.gathering.release(bucket)
                self.gathering.release_unused()

    def _unread(self):
        """Return what refuses reads of parameters that no gather serves: in the first step, on real tensors."""
        # the first step alone: a dispatch mode slows each operation down
        first = not self._steps and not any(isinstance(p, FakeTensor) for p in self.reducer.place)
        return self.gathering.unread() if first else contextlib.nullcontext()

    # --- around each unit --------------------------------------------------------------------------------------------

    def _trained_buckets(self, unit):
        return [bucket for bucket in self.parameters.of_unit[unit] if bucket in self.reducer.missing]

    def _before_forward(self, unit, args):
        self._backwards.enter(unit, self.reducer.running)
        for bucket in self.parameters.sharded(unit):
            self.gathering.gather(bucket, unit)
        self.gathering.casts.begin()

    def _after_forward(self, unit, args, output):
        self.gathering.casts.end()
        in_backward = self.reducer.running
        backward_follows = self._backwards.leave(output, in_backward)
        if not backward_follows and torch.is_grad_enabled() and not in_backward and is_opaque(output):
            raise TypeError(f"{type(unit).__name__}, a unit, returned {type(output).__name__}, in which no tensor can "
                            "be found: return tensors, tuples, lists, dicts or dataclasses")
        if self.reshard_after_forward or not backward_follows or in_backward:
            for bucket in self.parameters.sharded(unit):
                self.gathering.release(bucket)

    def backward(self, output: Any, gradient: torch.Tensor | None = None) -> None:
        """Compute gradients as `Zero2.backward` does."""
        self.gathering.computing += 1
        try:
            self.gathering.gather_kept_again()
            with self._unread():
                super().backward(output, gradient)
        finally:
            self.gathering.computing -= 1
            self._release_all()

    def _run_backward(self, output, gradient):
        self._backwards.begin_early(output)
        super()._run_backward(output, gradient)
        self._backwards.end_all()

    def _backward_begun(self, unit):
        """Gather a unit for its backward, and note which of its parameters get a gradient from it on this rank."""
        if not self.reducer.running:
            raise RuntimeError("loss.backward() by itself reduces nothing: call engine.backward(loss). "
                               "(torch.autograd.grad and double backward need stage 0 to 2)")
        for bucket in self._trained_buckets(unit):
            self.reducer.missing[bucket].update(
                slot.parameter for slot in bucket.slots  # those alone that this backward reaches
                if torch._C._will_engine_execute_node(self._accumulators[slot.parameter]))
        if reads_weights_in_backward(unit):  # an embedding's backward needs indices alone
            for bucket in self.parameters.sharded(unit):
                self.gathering.gather(bucket, unit)

    def _backward_ended(self, unit):
        """Release a unit, and reduce its gradients, unless some are still to come."""
        # parameters go first: the buffer of gradients takes their place in memory
        for bucket in self.parameters.sharded(unit) if reads_weights_in_backward(unit) else ():
            self.gathering.release(bucket)
        for bucket in self._trained_buckets(unit):
            if bucket in self.reducer.unlaunched and not self.reducer.missing[bucket] and not any(
                    map(self._backwards.is_recomputed_later, self.parameters.units_of[bucket])):
                self.reducer.launch(bucket)

    def step(self) -> None:
        """Update the parameters, on all ranks alike, and drop the gradients."""
        self.gathering.release_all()  # what a forward without a backward has left whole
        super().step()

    def _release_all(self):
        self._backwards.drop()
        self.gathering.end_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; `step` has done so."""
        super().zero_grad()
        self._backwards.forget()
