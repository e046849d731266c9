"""Data parallelism: every rank holds the whole model and its own part of the batch; gradients are averaged.

    g = (1/N) Σ_r g_r          all_reduce, one bucket at a time: 2(N−1)/N · Ψ elements from each rank

The loss is a mean, so the average over ranks of the gradients of equal parts is the gradient of the whole. Gradients
appear from the last layer to the first. As soon as a bucket has all of its gradients, its all_reduce begins, while
backward goes on with the layers before. "PyTorch Distributed" (Li et al. 2020), sections 3.2.2 and 3.2.3.

Bytes of model states on each rank, Ψ parameters in fp32 with Adam: 4Ψ + 4Ψ + 8Ψ. Nothing is saved yet; the three files
that follow take away one of the three terms each.
"""

import contextlib
import functools
import itertools

import torch

from ..comm.backend.versions import owns_storage
from ..memory import mark
from .bucket import Piece, buckets_of
from .internals.as_optimizer import ActsAsOptimizer
from .internals.consistency import check_model, check_phase, used_on_any_rank
from .internals.elementwise import check_elementwise
from .internals.norms import clip_, global_norm
from .saving.mixin import SavingMixin

BUCKET_BYTES = 25 * 2**20
IN_FLIGHT = 2  # buckets that are being reduced while the next one fills
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-3)


class DataParallel(SavingMixin, ActsAsOptimizer):
    """Trains a model: `engine.forward(…)`, `engine.backward(loss)` and `engine.step()` replace calls of the model, the
    loss and the optimizer.

    - `model`: the same on every rank. Rank 0's parameters and buffers are broadcast, once; parameters move to buckets.
    - `optimizer`: makes one from an iterable of parameters, or of groups: `partial(torch.optim.AdamW, lr=1e-3)`. Stages
      1 to 3 call it three times more, to try it on small tensors; TypeError for one that cannot take pieces.
    - `groups`: for several param groups, a function of the named parameters that returns a list of dicts as torch takes
      them; by default all parameters are in one group.
    - `bucket_bytes`: bytes of gradients that one collective moves; a larger tensor has a bucket of its own.
    - `reduce_dtype`: the dtype in which gradients are sent and averaged; by default their own.

    The engine can stand where an optimizer is expected, by schedules of lr and loss scalers. A scaler has to ask all
    ranks: AdaptiveLossScaler(comm=comm), or at stage 0 torch's GradScaler, which leaves the gradients of a step that it
    skips: call `zero_grad`. CollectiveMismatch names ranks with another model, or in another micro-batch. An exception
    in backward leaves no gradient and no collective behind, so that all ranks can try the step again.
    """

    stage = 0  # of ZeRO

    def __init__(self, model, comm, optimizer=ADAMW, *, groups=None, bucket_bytes=BUCKET_BYTES, reduce_dtype=None):
        self.model, self.comm, self.reduce_dtype = model, comm, reduce_dtype
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        if isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is an {type(optimizer).__name__} already: expected what makes one, such as "
                            "functools.partial(torch.optim.AdamW, lr=1e-3)")
        if not named:
            raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
        if on_meta := [name for name, p in model.named_parameters() if p.device.type == "meta"]:
            raise ValueError(f"{on_meta[0]} is on the meta device: Zero3 gives such a model its values, unit by unit")
        self.frozen_buckets = []  # of parameters that are not trained, where those are in shards
        self.buckets = self._lay_out(named, bucket_bytes)
        check_model(comm, [*self.buckets, *self.frozen_buckets])
        if self.stage:  # a rank's optimizer gets flat pieces
            check_elementwise(optimizer, groups, named)
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        self._bucket_of = {slot.parameter: bucket for bucket in self.buckets for slot in bucket.slots}
        self._slot_of = {slot.parameter: slot for bucket in self.buckets for slot in bucket.slots}
        self._gradients, self._views = {}, {}  # bucket → its buffer; parameter → its gradient in it
        self._used, self._missing, self._unlaunched, self._handles = set(), {}, {}, {}
        self._running = False  # whether a backward is running
        self._syncing, self._synced, self._steps, self._micro_batches = True, False, 0, 0
        self._hold_parameters()
        self.optimizer = self._make_optimizer(optimizer, groups, named)
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    # --- what a caller does ------------------------------------------------------------------------------------------

    def forward(self, *args, **kwargs):
        """Return the model's output."""
        return self.model(*args, **kwargs)

    __call__ = forward

    def backward(self, loss):
        """Compute the gradients of this micro-batch and add them to those that are there. Outside of `no_sync` buckets
        are reduced meanwhile, and gradients are averaged over all ranks when this returns."""
        check_phase(self.comm, "backward", self._steps, self._micro_batches)
        if thawed := [name for name, p in self._frozen if p.requires_grad]:
            raise RuntimeError(f"{thawed[0]} requires a gradient now, and did not when the engine was made: it is in "
                               "no bucket and has no optimizer state. Make a new engine of the model")
        self._missing = {bucket: self._awaited(bucket) for bucket in self.buckets}
        self._unlaunched, self._running = dict.fromkeys(self.buckets if self._syncing else ()), True
        try:
            loss.backward()
            self._finish()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._running = False
        self._micro_batches, self._synced = self._micro_batches + 1, self._syncing

    @contextlib.contextmanager
    def no_sync(self):
        """Let backwards in this context add up gradients on each rank alone; the first one after it reduces the sum."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def step(self):
        """Update the parameters, on all ranks alike, and drop the gradients."""
        self._check_reduced()
        check_phase(self.comm, "step", self._steps, self._micro_batches)
        self._update(self._used_parameters())
        self._steps += 1
        self.zero_grad()

    def zero_grad(self, set_to_none=True):
        """Drop the gradients; `step` has done so."""
        for parameter in self._bucket_of:
            parameter.grad = None
        self._views.clear(), self._gradients.clear(), self._used.clear()
        self._micro_batches, self._synced = 0, False

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale all gradients so that their norm, over all parameters, is at most `max_norm`. Returns the norm before,
        an fp32 scalar; it is NaN or inf if a gradient is. All ranks call it, between the last backward and the step."""
        norm_type = float(norm_type)
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type}: expected a number above 0, or inf")
        self._check_reduced()
        check_phase(self.comm, "clip_grad_norm_", self._steps, self._micro_batches)
        gradients = self._held_gradients()
        norm = global_norm(self.comm, gradients, norm_type, self._gradients_are_whole)
        clip_(gradients, norm, max_norm)
        return norm

    @contextlib.contextmanager
    def gathered(self, write=False):
        """Gather all parameters, to be read. What is written to them is lost, unless `write`: then rank 0's values are
        those of all ranks when the context ends, of masters too. All ranks call it; at stages 0 to 2 parameters are
        whole anyway."""
        yield
        if write:
            with self._load_all_states():
                self._spread_written()

    _gradients_are_whole = True  # whether every rank holds all gradients after they are reduced

    def _held_gradients(self):
        return [p.grad for p in self._bucket_of if p.grad is not None]

    # --- parameters and optimizer ------------------------------------------------------------------------------------

    def _lay_out(self, named, bucket_bytes):
        return buckets_of(named, self.comm.world_size, bucket_bytes)

    def _hold_parameters(self):
        """Move each bucket's parameters to one buffer, and broadcast it from rank 0."""
        self.flat = {}
        for bucket in self.buckets:
            flat = self.flat[bucket] = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)
            for slot, view in zip(bucket.slots, bucket.views(flat), strict=True):
                view.copy_(slot.parameter.detach())
                slot.parameter.data = view
            self.comm.broadcast(flat, 0, out=flat, label=bucket.name)
        self._broadcast_rest()

    def _broadcast_rest(self):
        """Broadcast buffers and frozen parameters that every rank keeps whole."""
        held = {slot.parameter for bucket in (*self.buckets, *self.frozen_buckets) for slot in bucket.slots}
        rest = [*self.model.buffers(), *(p for p in self.model.parameters() if p not in held)]
        for tensor in rest:
            self.comm.broadcast(tensor.detach(), 0, out=tensor.detach())

    def _make_optimizer(self, optimizer, groups, named):
        return optimizer([p for _, p in named] if groups is None else groups(named))

    def _update(self, used):
        for parameter in self._bucket_of:
            if parameter not in used:
                parameter.grad = None  # no rank has used it, so the optimizer must not change it
        self.optimizer.step()

    def _used_parameters(self):
        """Return the parameters that some rank has a gradient of."""
        parameters = list(self._bucket_of)
        found = used_on_any_rank(self.comm, [p in self._used for p in parameters])
        return {p for p, any_rank in zip(parameters, found, strict=True) if any_rank}

    # --- for saving --------------------------------------------------------------------------------------------------

    def _held_pieces(self):
        """Return {bucket: [(Piece, tensor)]} that this rank's optimizer updates: here all whole parameters."""
        return {bucket: [(Piece(slot, 0, slot.end - slot.first, slot.first), slot.parameter) for slot in bucket.slots]
                for bucket in self.buckets}

    def _owned_pieces(self):
        """Return the pieces that this rank saves: like `_held_pieces`, but each element on one rank only."""
        return {bucket: [(piece, piece.slot.parameter) for piece in bucket.pieces(self.comm.rank)]
                for bucket in self.buckets}

    def _group_names(self):
        """Return [[names of the parameters] of each param group]."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [[names[p] for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def _spread_written(self):
        """Broadcast what rank 0 has written to the parameters."""
        for bucket, flat in self.flat.items():
            self.comm.broadcast(flat, 0, out=flat, label=bucket.name)
        self._broadcast_rest()

    def _after_load(self):
        """Update the parameters after a load has written to `_held_pieces`. No-op: they are the parameters here."""

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _arrived(self, parameter):
        """Put a complete gradient into its bucket. Autograd calls this hook once for each parameter in a backward."""
        self._check_running()
        bucket = self._bucket_of[parameter]
        if self._syncing and bucket not in self._unlaunched:
            raise RuntimeError(f"{self._slot_of[parameter].name} got a gradient again after its bucket was reduced, as "
                               "when two reentrant recomputations use it: recompute with use_reentrant=False")
        self._take(bucket, parameter)
        self._used.add(parameter)
        self._missing[bucket].discard(parameter)
        self._launch_ready()

    def _check_running(self):
        if not self._running:
            self.zero_grad()
            raise RuntimeError("loss.backward() by itself reduces nothing: call engine.backward(loss)")

    def _awaited(self, bucket):
        """Return the parameters whose gradients a bucket waits for when a backward begins."""
        return {slot.parameter for slot in bucket.slots}

    def _take(self, bucket, parameter):
        """Move the gradient to its bucket's buffer, where autograd adds to it from then on."""
        if parameter.grad is not self._views.get(parameter):
            parameter.grad = self._views[parameter] = self._placed(bucket, parameter, parameter.grad)

    def _placed(self, bucket, parameter, gradient):
        """Return the gradient in its bucket's buffer; one that fills the bucket alone becomes the buffer."""
        if gradient.layout is not torch.strided:
            raise TypeError(f"the gradient of {self._slot_of[parameter].name} is {gradient.layout}: expected a dense "
                            "one, as nn.Embedding gives with sparse=False")
        if self._is_whole(bucket, gradient):
            self._gradients[bucket] = mark(gradient, "gradients").view(-1)
            return gradient
        return self._slot_of[parameter].view(self._buffer(bucket)).copy_(gradient)

    def _is_whole(self, bucket, gradient):
        return (bucket not in self._gradients and gradient.numel() == bucket.numel and gradient.is_contiguous()
                and gradient.dtype == self._buffer_dtype(bucket) and owns_storage(gradient))

    def _buffer(self, bucket):
        """Return the bucket's buffer of gradients. Only the parts that are in `_views` have been written."""
        if bucket not in self._gradients:
            flat = torch.empty(bucket.numel, dtype=self._buffer_dtype(bucket), device=bucket.device)
            self._gradients[bucket] = mark(flat, "gradients")
            bucket.clear_padding(flat)
        return self._gradients[bucket]

    def _buffer_dtype(self, bucket):
        return bucket.dtype

    def _launch_ready(self):
        """Launch complete buckets, in the order of `buckets`, which is the same on all ranks."""
        for bucket in list(itertools.takewhile(lambda bucket: not self._missing[bucket], self._unlaunched)):
            self._launch(bucket)

    def _launch(self, bucket):
        """Launch a bucket's collective; a parameter without a gradient on this rank has zeros."""
        while len(self._handles) >= IN_FLIGHT:  # each may hold memory until it ends
            oldest = next(iter(self._handles))
            self._reduced(oldest, self._handles.pop(oldest).wait())
        del self._unlaunched[bucket]
        for slot in bucket.slots:
            if slot.parameter not in self._views:  # this rank has not used it
                self._views[slot.parameter] = slot.view(self._buffer(bucket)).zero_()
        self._handles[bucket] = self._reduce(bucket)

    def _reduce(self, bucket):
        """Launch the all_reduce that averages one bucket."""
        flat = self._gradients[bucket]
        if self.reduce_dtype in (None, flat.dtype):
            return self.comm.all_reduce(flat, "avg", out=flat, async_op=True, label=bucket.name)
        return self.comm.all_reduce(flat.to(self.reduce_dtype), "avg", async_op=True, label=bucket.name)

    def _finish(self):
        """End a backward: launch buckets with parameters that were not used, and wait for all results."""
        for bucket in list(self._unlaunched):
            self._launch(bucket)
        for bucket in list(self._handles):
            self._reduced(bucket, self._handles.pop(bucket).wait())

    def _reduced(self, bucket, average):
        if average is not self._gradients[bucket]:
            self._gradients[bucket].copy_(average)
        for slot in bucket.slots:
            slot.parameter.grad = self._views[slot.parameter]  # also if only another rank has used it

    def _abandon(self):
        """Wait for the collectives in flight and drop the gradients, after an exception."""
        handles, self._handles = list(self._handles.values()), {}
        for handle in handles:
            handle.wait()
        self.zero_grad()

    def _check_reduced(self):
        """Raise RuntimeError unless there are gradients, averaged over all ranks."""
        if not self._micro_batches:
            raise RuntimeError("step without gradients: call engine.backward(loss) first")
        if not self._synced:
            raise RuntimeError("the last backward was in no_sync, so each rank has gradients of its own: leave "
                               "no_sync before the last micro-batch")
