"""ZeRO stage 3: parameters, too, are kept in shards, and are whole only while a module computes with them.

A unit is a module whose parameters come and go together, by default each block of the model. Its bucket is gathered
before its forward, let go after it, gathered again before its backward, and let go when its gradients are there:

    all_gather for forward      (N−1)/N · Ψ
    all_gather for backward     (N−1)/N · Ψ
    reduce_scatter              (N−1)/N · Ψ          3Ψ in all, half as much again as data parallelism

Bytes with Adam in fp32: (4Ψ + 4Ψ + 8Ψ)/N and the units that are whole at the moment. "ZeRO" (Rajbhandari et al. 2020),
sections 5.3 and 7.2.2.

A parameter is let go by resizing its storage to nothing. What autograd saved of it, a transposed view of a weight, is
in that storage and comes back with it; a new tensor in `parameter.data` would leave the old one alive in that view.
"""

import contextlib

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..memory import mark
from .agreement import check_phase
from .bucket import Bucket
from .gathering import Gathering
from .pieces import Pieces
from .zero2 import Zero2

LOOK_AHEAD = 50_000_000  # elements


class Zero3(Zero2):
    """`Zero2` that keeps parameters in shards: same arguments, same numbers, and

    - `units`: modules whose parameters come and go together; by default the elements of each `nn.ModuleList`, and
      every other module that has parameters of its own. One that holds blocks in a list does not bring theirs.
    - `look_ahead`: elements that are gathered ahead of the unit that computes, in the order of the last step.
    - `max_live_parameters`: nothing is gathered ahead beyond so many elements that are whole.
    - `persistence_threshold`: parameters of fewer elements stay whole; for the optimizer they are in shards.
    - `reshard_after_forward`: False keeps units whole from forward to backward: 2Ψ on the wire, and Ψ in memory.

    Outside of forward and backward the model's parameters are away: they read as NaN, and what is written to
    them is refused or lost. `with engine.gathered():` brings them for a while.
    RuntimeError in backward names a parameter that a forward read although no unit that holds it was called.
    """

    stage = 3

    def __init__(self, model, comm, *args, units=None, look_ahead=LOOK_AHEAD, max_live_parameters=10**9,
                 persistence_threshold=0, reshard_after_forward=True, **options):
        self.units = default_units(model) if units is None else list(dict.fromkeys(units))
        self.persistence_threshold, self.reshard_after_forward = persistence_threshold, reshard_after_forward
        self._ahead = look_ahead, max_live_parameters
        super().__init__(model, comm, *args, **options)
        self._open = dict.fromkeys(self.units, 0)  # backwards of a unit that are under way
        self._met = set()  # buckets that some forward has asked for
        before, after = map(torch.compiler.disable, (self._before_forward, self._after_forward))  # storages come and go
        for unit in self.units:
            unit.register_forward_pre_hook(before, prepend=True, with_kwargs=True)  # others' may look at parameters
            unit.register_forward_hook(after, always_call=True)

    def forward(self, *args, **kwargs):
        """The model's own. All ranks call it together, and run the same units in the same order."""
        check_phase(self.comm, "forward", self._steps, self._micro_batches)
        self.gathering.settle()
        backward_follows = False
        try:
            output = self.model(*args, **kwargs)
            backward_follows = torch.is_grad_enabled()
            return output
        finally:
            if not backward_follows:
                self.gathering.settle()

    __call__ = forward

    @contextlib.contextmanager
    def gathered(self):
        """All parameters whole, to be read; what is written to them is lost."""
        going = [bucket for bucket in self.buckets if not self._stays(bucket)]
        for bucket in going:
            self.gathering.need(bucket)
        try:
            yield
        finally:
            for bucket in going:
                self.gathering.let_go(bucket)
            self.gathering.settle()

    # --- where parameters are ----------------------------------------------------------------------------------------

    def _lay_out(self, named, bucket_bytes):
        buckets = unit_buckets(named, self.units, self.comm.world_size, self.persistence_threshold)
        place = {slot.parameter: bucket for bucket in buckets for slot in bucket.slots}
        self._buckets_of_unit = {unit: list(dict.fromkeys(place[p] for p in parameters if p in place))
                                 for unit, parameters in parameters_of_units(self.units).items()}
        return buckets

    def _hold_parameters(self):
        """Of each bucket this rank's shard; parameters are views of a tensor whose storage comes and goes."""
        self.shards, self.full = {}, {}
        for bucket in self.buckets:
            full = self.full[bucket] = mark(torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device),
                                            "parameters")
            for slot, view in zip(bucket.slots, bucket.views(full), strict=True):
                view.copy_(slot.parameter.detach())
                slot.parameter.data = view
            self.comm.broadcast(full, 0, out=full)
            self.shards[bucket] = mark(bucket.shard(full, self.comm.rank).clone(), "parameters")
            if not self._stays(bucket):
                full.untyped_storage().resize_(0)
        self._broadcast_rest()
        self.gathering = Gathering(self.comm, self.shards, self.full, *self._ahead, self.store)

    def _stays(self, bucket):
        return all(slot.parameter.numel() < self.persistence_threshold for slot in bucket.slots)

    def _make_optimizer(self, optimizer, groups, named):
        self._gradient_shards = {}
        self.pieces = Pieces(self.buckets, self.shards, self.comm.rank, optimizer, groups, named)
        return self.pieces.optimizer

    def _after_update(self, bucket):
        """What stays whole is gathered now, all else when it is needed."""
        return self.comm.all_gather(self.shards[bucket], out=self.full[bucket], async_op=True) if self._stays(
            bucket) else None

    def _resting(self, bucket):
        stays = {} if self._stays(bucket) else {self.gathering.key(bucket): [self.shards[bucket]]}
        return super()._resting(bucket) | stays

    def _loaded(self):
        self._let_all_go()
        super()._loaded()

    # --- around each unit --------------------------------------------------------------------------------------------

    def _coming_and_going(self, unit):
        return [bucket for bucket in self._buckets_of_unit[unit] if not self._stays(bucket)]

    def _before_forward(self, unit, args, kwargs):
        for bucket in self._coming_and_going(unit):
            self._met.add(bucket)
            self.gathering.need(bucket)
        if not torch.is_grad_enabled():
            return None
        leaves, structure = pytree.tree_flatten((args, kwargs))
        where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
        if not where:
            return None
        passed = _AfterBackward.apply(self, unit, *(leaves[i] for i in where))
        for i, x in zip(where, passed, strict=True):
            leaves[i] = x
        return pytree.tree_unflatten(leaves, structure)

    def _after_forward(self, unit, args, output):
        tensors = [x for x in _tensors_in(output) if x.requires_grad]
        if torch.is_grad_enabled() and tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, lambda gradient: self._before_backward(unit),
                                                          mode="any")
        if self.reshard_after_forward or not tensors or self._running:
            for bucket in self._coming_and_going(unit):
                self.gathering.let_go(bucket)

    def _arrived(self, parameter):
        bucket = self._bucket_of[parameter]
        if bucket not in self._met and not self._stays(bucket):
            raise RuntimeError(f"{self._slot_of[parameter].name} was read while it was away, as NaN: no unit that "
                               "holds it was called. Name in `units` the module whose forward reads it")
        super()._arrived(parameter)

    def _before_backward(self, unit):
        if type(unit) is nn.Embedding:
            return  # its gradient follows from the indices alone
        self._open[unit] += 1
        for bucket in self._coming_and_going(unit):
            self.gathering.need(bucket)

    def _after_backward(self, unit):
        if self._open[unit]:
            self._open[unit] -= 1
            for bucket in self._coming_and_going(unit):
                self.gathering.let_go(bucket)

    def _finish(self):
        super()._finish()
        self._let_all_go()

    def _abandon(self):
        super()._abandon()
        self._let_all_go()

    def _let_all_go(self):
        self._open = dict.fromkeys(self.units, 0)
        self.gathering.end()


def _tensors_in(output, seen=()):
    """Those in lists, dicts and whatever pytree knows, and in attributes of other objects, as of a dataclass."""
    for x in pytree.tree_leaves(output):
        if isinstance(x, torch.Tensor):
            yield x
        elif not isinstance(x, (type, nn.Module)) and hasattr(x, "__dict__") and id(x) not in seen:
            yield from _tensors_in(vars(x), (*seen, id(x)))


class _AfterBackward(torch.autograd.Function):
    """Its inputs, unchanged; when all their gradients are there, the unit that took them is done with backward."""

    @staticmethod
    def forward(ctx, engine, unit, *tensors):
        ctx.engine, ctx.unit = engine, unit
        return tensors

    @staticmethod
    def backward(ctx, *gradients):
        ctx.engine._after_backward(ctx.unit)
        return None, None, *gradients


def unit_buckets(named, units, world_size, persistence_threshold=0):
    """A Bucket for each unit and dtype, the last unit first, and others for what stays whole. A parameter of several
    units is in the first one's. ValueError for a parameter that is in none."""
    names, buckets, taken = {p: name for name, p in named}, [], set()
    for parameters in parameters_of_units(units).values():
        kinds = {}
        for p in parameters:
            if p in names and p not in taken:
                kinds.setdefault((p.dtype, p.device, p.numel() < persistence_threshold), []).append((names[p], p))
                taken.add(p)
        buckets += [Bucket(slots, world_size) for slots in kinds.values()]
    if left := [name for p, name in names.items() if p not in taken]:
        raise ValueError(f"{left[0]} is in none of the {len(units)} units: name a module that holds it")
    return buckets[::-1]


def parameters_of_units(units):
    """{unit: what comes and goes with it}: all parameters in it, but not those in units of their own that it has in a
    ModuleList. A model with a parameter of its own beside its blocks does not bring all of them with it."""
    known, found = set(units), {}
    for unit in units:
        lists = [module for module in unit.modules() if isinstance(module, nn.ModuleList)]
        apart = {module for each in lists for module in each.modules() if module in known} - {unit}
        found[unit] = list(dict.fromkeys(p for _, module in unit.named_modules(memo=apart)
                                         for p in module.parameters(recurse=False)))
    return found


def default_units(model):
    """The elements of each ModuleList, and every module outside of them that has parameters of its own. A module
    without a forward, a list or a dict, is never called: its parameters are its parent's, and each module in it is a
    unit by itself."""
    found = {}

    def walk(module, in_list):
        if module is model or _is_called(module):
            if in_list or _has_own(module):
                found[module] = None
            if in_list:
                return
        for child in module.children():
            walk(child, isinstance(module, nn.ModuleList) or in_list)

    walk(model, False)
    return list(found)


def _is_called(module):
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _has_own(module):
    """Parameters that no module inside it that is called could bring."""
    return next(module.parameters(recurse=False), None) is not None or any(
        _has_own(child) for child in module.children() if not _is_called(child))
