"""An engine trains a model on several ranks. Each stage of ZeRO chooses its three parts.

    parameters    where they are: `WholeParameters`, on every rank, or in shards, `sharded_parameters`
    reducer       averages gradients over the ranks, bucket by bucket, while backward runs: `Reducer`
    update        runs the optimizer on what this rank has to update: `WholeUpdate` or `ShardedUpdate`

A step: `forward`, `backward`, again for more micro-batches, `clip_grad_norm_` if wanted, `step`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..comm.agreement import check_phase, check_same, used_on_any_rank
from ..sharding import spec_of
from .bucket import buckets_of, default_bucket_bytes
from .hybrid import holders, levels_of
from .internals.argument_checks import check_frozen, check_optimizer, check_parts, settings_of, trained_and_frozen
from .internals.as_optimizer import ActsAsOptimizer
from .internals.companion import Companion
from .internals.elementwise import check_elementwise, computes_nothing
from .internals.hook import attach
from .internals.norms import clip_grad_norm_
from .internals.persistence import load, load_state_dict, save, save_weights, shards, state_dict
from .internals.replicas import check_replicas
from .internals.store import BucketStore, StoredUpdate
from .internals.writes import Writes, gathered
from .parameters import WholeParameters
from .update import ShardedUpdate

if TYPE_CHECKING:
    from ..allocator.settings import Settings
    from ..comm.communicator import Communicator

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


class Engine(ActsAsOptimizer):
    """What all stages share; `DataParallel` says what the arguments are. Subclasses name a Reducer and an Update."""

    stage = reducer_type = update_type = None
    clip_grad_norm_, gathered, shards, save, load = clip_grad_norm_, gathered, shards, save, load
    state_dict, load_state_dict, save_weights = state_dict, load_state_dict, save_weights

    def __init__(self, model: torch.nn.Module, comm: "Communicator",
                 optimizer: Callable[..., torch.optim.Optimizer] = ADAMW, *, groups: Any = None,
                 bucket_bytes: int | None = None, reduce_dtype: torch.dtype | None = None,
                 world: "Communicator | None" = None, shards: "Communicator | None" = None,
                 replicas: "Communicator | None" = None, store: Any = None, update: Any = None, hook: Any = None,
                 in_flight_bytes: int | None = None) -> None:
        if in_flight_bytes is not None and not in_flight_bytes >= 0:
            raise ValueError(f"in_flight_bytes={in_flight_bytes}: expected bytes from 0 on, or None")
        self.model, self.comm, self.world = model, comm, comm if world is None else world
        self.levels = levels_of(comm, shards, replicas, self.stage)
        named, self._frozen = trained_and_frozen(model, optimizer, *((None, None) if self.stage else (store, update)))
        check_same(comm, "engine", f"{type(self).__name__}, bucket_bytes={bucket_bytes}, reduce_dtype={reduce_dtype}")
        self.buckets, self.frozen_buckets = self._lay_out(named, bucket_bytes)
        self.specs = {name: spec_of(name, x) for name, x in (*model.named_parameters(), *model.named_buffers())}
        check_parts(self)
        within = self.levels.shards
        self.holders = holders(self.specs, self.world, replicas) if replicas else {}
        if self.stage:  # a rank's optimizer gets flat pieces
            check_elementwise(optimizer, groups, named)
        attach(hook, within, self.buckets, self.stage)  # before the first bytes of shards, as it takes some itself
        self._stored = BucketStore(store, [*self.buckets, *self.frozen_buckets])
        self._make_parameters()
        make = update or (self.update_type if store is None else StoredUpdate)
        self.update = make(self.buckets, self.parameters.shards, within.rank, optimizer, groups, named, self._stored)
        check_optimizer(comm, self.optimizer)
        self.reducer = self.reducer_type(self.buckets, within, self.update, reduce_dtype, replicas, hook,
                                         in_flight_bytes)
        self._syncing, self._steps, self.clipped = True, 0, {}
        self.writes = Writes(comm.world_size == 1, self.parameters.stay(), self.parameters.shards, within.rank)
        watched = isinstance(self.update, ShardedUpdate) and not computes_nothing(named)  # CPUAdam is known
        self._companion = Companion(optimizer, groups, named) if watched else None

    def check_phase(self, phase: str, settings: "Settings | None" = None) -> None:
        """Raise CollectiveMismatch on all ranks unless all are about to do the same: `phase`, in the same micro-batch,
        with the same `settings`. Modules must have written the same to parameters, too (`internals.writes`)."""
        self.writes.look()  # what modules wrote travels with this check, in one message
        self.writes.settle(self._stored, self.update, lambda digests: check_phase(
            self.comm, phase, self._steps, self.reducer.micro_batches, self.levels.parts, digests, settings))

    def _lay_out(self, named, bucket_bytes):
        """Return the buckets of what is trained, and those of frozen parameters that are in shards."""
        bucket_bytes = default_bucket_bytes(named, self.stage) if bucket_bytes is None else bucket_bytes
        return buckets_of(named, self.levels.shards.world_size, bucket_bytes), []

    def _make_parameters(self):
        self.parameters = WholeParameters(self.model, self.levels, self.buckets)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output."""
        return self.model(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, as `forward` does."""
        return self.forward(*args, **kwargs)

    def backward(self, output: Any, gradient: torch.Tensor | None = None) -> None:
        """Compute the gradients of this micro-batch and add them to those that are there. Outside of `no_sync` buckets
        are reduced meanwhile, and gradients are averaged over all ranks when this returns.

        `output`: a loss; or any tensor or list of tensors, with the `gradient` that the rest of the computation, as the
        next stage of a pipeline, returned for it. After several forwards, their backwards may run in any order.
        TypeError for a dict, as models of transformers return: give its loss.
        """
        if isinstance(output, Mapping):
            raise TypeError(f"backward({type(output).__name__}): expected a loss or another tensor; a model of "
                            "transformers has it in its output: engine.backward(output.loss)")
        self.check_phase("backward")
        check_frozen(self._frozen)
        with self.reducer.reducing(self._syncing):
            self._run_backward(output, gradient)

    def _run_backward(self, output, gradient):
        torch.autograd.backward(output, gradient)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backwards in this context add up gradients on each rank alone; the first one after it reduces the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Collect the gradients of backwards that others run in this context, as a pipeline does for its stages. They
        add up in `.grad` as those of one micro-batch, and are averaged over all ranks at the end. RuntimeError above
        stage 1, where parameters or gradients would not be whole in between."""
        if self.stage not in (0, 1):
            raise RuntimeError(f"collect at stage {self.stage}: expected DataParallel or Zero1, whose gradients are "
                               "whole until they are reduced")
        self.check_phase("backward")
        check_frozen(self._frozen)
        with self.reducer.reducing(False):  # a stage's later micro-batches still add to its gradients
            yield
        with self.reducer.reducing(True):
            self.reducer.accept_all_gradients()

    def step(self) -> None:
        """Update the parameters, on all ranks alike, and drop the gradients. RuntimeError on all ranks, before anything
        is written, if the optimizer no longer treats each element by itself."""
        self.reducer.check_reduced()
        self.check_phase("step", settings_of(self))
        check_replicas(self)
        if self._companion is not None:
            self._companion.step(self.param_groups)
        # a rank updates its shard of a parameter that others alone have used: the average is the same on all
        self.update.step(used_on_any_rank(self.comm, self.reducer.place, self.reducer.used), self.parameters.updated)
        self._steps += 1
        if self.reducer.hook is not None:
            self.reducer.hook.step()
        self.writes.see()  # what the optimizer wrote is no module's write
        self.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; `step` has done so."""
        self.reducer.drop()
        if (multiply := self.multiply_gradients) is not None:
            multiply(1.0)  # a step that is skipped would have used up the factor

    @property
    def multiply_gradients(self) -> Callable[[float], None] | None:
        """Return a function of a factor for gradients in fp16, in the next norm and step, where they are fp32: a loss
        scaler divides by it, as fp16 could not hold the quotient. None for gradients that can be divided in place."""
        low = any(bucket.dtype is torch.float16 for bucket in self.buckets)
        return getattr(self.update, "multiply_gradients", None) if low else None

    def gradients(self) -> Iterator[list[torch.Tensor]]:
        """Yield, bucket by bucket, the list of all gradients that this rank has. A store may have them elsewhere until
        their bucket's turn comes."""
        for _, pairs in self.update.with_gradients():
            yield [own.grad for _, own in pairs if own.grad is not None]

    @property
    def optimizer(self) -> Any:
        """Return the optimizer; above stage 0 it has pieces of parameters."""
        return self.update.optimizer
