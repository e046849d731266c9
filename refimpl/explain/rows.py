"""Which storages grow with the rows of a batch: rows are followed from the batch through the operations.

A storage has its rows along one dimension: `count` of them, `stride` elements apart. Views need no rule then: the
dimension of a view that has such a stride is the one of the rows. What an operation makes is asked of its own shape
function: with twice the rows on the meta device, the dimension of its output that is twice as long is the rows'.
"""

import math
from typing import NamedTuple

import torch

from ..common.nested_tensors import tensors_in
from ..memory.storage_records import FORWARD

aten = torch.ops.aten
NORMS = {aten.native_batch_norm, aten._native_batch_norm_legit, aten.cudnn_batch_norm, aten.miopen_batch_norm}
PICKS = {aten.nonzero, aten.masked_select, aten.index, aten._unique2, aten.unique_dim}  # as many as the values say


class Axis(NamedTuple):
    """Where the rows of a storage are: `count` of them, `stride` elements apart."""

    count: int
    stride: int


class Rows:
    """Follows the rows of the batches of one run. `of`: {number of a record: Axis}. `why_not`: the reason why batches
    cannot be cut, as that something ties rows to each other; None if there is none."""

    def __init__(self, tracker):
        self.of, self.why_not, self.count = {}, None, None
        self._tracker, self._reduced, self._known = tracker, set(), {}

    def enter(self, batch, first):
        """Note that a model is called on `batch`, tensors: their first dimension, and that of what was made since the
        record `first` and has as many, counts the rows."""
        sizes = [tensor.shape[0] for tensor in batch if tensor.ndim]
        self.count = next((tensor.shape[0] for tensor in batch if tensor.ndim > 1), 1)
        if len({*sizes, 1}) > 2:
            self.why_not = (f"a model is called on tensors with {', '.join(map(str, dict.fromkeys(sizes)))} in their "
                            "first dimensions: which of them are the rows is not known")
        if self.count == 1 or self.why_not:
            self.count = None
            return
        for tensor in batch:
            if tensor.ndim and tensor.shape[0] == self.count and tensor.layout is torch.strided and tensor.stride(0):
                self.of.setdefault(self._number(tensor), Axis(self.count, tensor.stride(0)))
        for number in range(first, len(self._tracker.records)):
            record = self._tracker.records[number]
            if record.alive and record.shape[:1] == (self.count,):
                self.of.setdefault(number, Axis(self.count, math.prod(record.shape[1:])))

    def follow(self, func, args, kwargs, outputs):
        """Note the rows of what an operation made."""
        if self.count is None or func is aten.detach.default:
            return
        try:
            self._follow(func, args, kwargs, outputs)
        except Exception as error:  # the program goes on: it is not its fault
            self.why_not, self.count = f"its rows could not be followed through {func}: {error}", None

    def _follow(self, func, args, kwargs, outputs):
        given = [*tensors_in(args), *tensors_in(kwargs)]
        dims = [self._dim(tensor) for tensor in given]
        made = [each for each in tensors_in(outputs if isinstance(outputs, (tuple, list)) else (outputs,))
                if each.layout is torch.strided]
        forward = self._tracker.phase() == FORWARD
        if any(dim is not None for dim in dims):
            found = self._scaled(func, args, kwargs, given, dims, made)
            if forward:
                self._couples(func, args, given, dims, made, found)
        else:
            found = [[0] if self._as_many(each, given) else [] for each in made]
            if forward and any(self._number(each) in self._reduced for each in given):
                self._reduced.update(self._number(each) for each in made)
        for tensor, scaled in zip(made, found, strict=True):
            number = self._number(tensor)
            if number is not None and number not in self.of and scaled:
                self.of[number] = self._axis(tensor, scaled[0], given, dims)

    def _number(self, tensor):
        return next(iter(self._tracker.numbers_of(tensor)), None)

    def _dim(self, tensor):
        """Return the dimension in which a tensor has its rows, None if in none."""
        if isinstance(tensor, torch.nn.Parameter):  # it may have as many
            self.of.pop(self._number(tensor), None)
        axis = self.of.get(self._number(tensor)) if tensor.layout is torch.strided else None
        if axis is None:
            return None
        for dim, (n, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            if n > 1 and stride == axis.stride:  # the rows, some of them, or others outside of them
                return dim
            if n > 1 and 0 < stride < axis.stride < n * stride and axis.stride % stride == 0:  # rows × what is in each
                return dim
        return None

    def _axis(self, tensor, dim, given, dims):
        """Return the Axis of a tensor whose dimension `dim` has the rows."""
        n, stride = tensor.shape[dim], tensor.stride(dim)
        for other, at in zip(given, dims, strict=True):
            if at is not None and other.shape[at] == n:
                axis = self.of[self._number(other)]
                return Axis(axis.count, stride * (axis.stride // other.stride(at)))
        count = self.count if n % self.count == 0 else n
        return Axis(count, stride * (n // count))

    def _as_many(self, tensor, given):
        """Tell whether an operation without rows made as many as there are: a factory, or what was expanded."""
        return tensor.ndim > 0 and tensor.shape[0] == self.count and (
            not given or any(each.shape[:1] == (self.count,) and each.stride(0) == 0 for each in given
                             if each.layout is torch.strided))

    def _scaled(self, func, args, kwargs, given, dims, made):
        """List, for each tensor made, the dimensions that are twice as long with twice the rows."""
        if func.overloadpacket is aten.cat and (at := _cat_dim(args, kwargs, given)) in dims and len(
                {(each.shape[at], dim) for each, dim in zip(given, dims, strict=True) if each.ndim > at}) > 1:
            return [[] for _ in made]  # one batch after the other, as in an evaluation: more of them are no longer
        try:
            key = (func, tuple((each.shape, each.dtype, dim) for each, dim in zip(given, dims, strict=True)),
                   _plain(args), _plain(kwargs))
            if key not in self._known:
                self._known[key] = _twice(func, args, kwargs, given, dims, made)
            return self._known[key]
        except Exception:
            lengths = {each.shape[dim] for each, dim in zip(given, dims, strict=True) if dim is not None}
            return [[dim for dim, n in enumerate(each.shape) if n in lengths][:1]
                    or [0] * (func.overloadpacket in PICKS and each.ndim > 0) for each in made]

    def _couples(self, func, args, given, dims, made, found):
        """Note an operation of forward that ties rows to each other."""
        trains = func.overloadpacket in NORMS and any(each is True for each in args)
        if trains or func.overloadpacket is aten._batch_norm_with_update:
            self.why_not = self.why_not or "batch norm takes its mean over the rows"
        elif any(len(scaled) > 1 for scaled in found):
            self.why_not = self.why_not or "each row is compared with the others, as in a contrastive loss"
        elif torch.Tag.pointwise in func.tags and found[0] and any(
                self._number(each) in self._reduced and dim is None for each, dim in zip(given, dims, strict=True)):
            self.why_not = self.why_not or "a mean or sum over the rows goes back into them"
        if made and not any(found):
            self._reduced.update(self._number(each) for each in made if each.is_floating_point())


def _twice(func, args, kwargs, given, dims, made):
    """Ask the shape function, once with the rows as they are and once with twice as many."""
    def asked(times):
        metas = iter([torch.empty([n * times if at == dim else n for at, n in enumerate(each.shape)],
                                  dtype=each.dtype, device="meta") for each, dim in zip(given, dims, strict=True)])
        replaced = _replaced(args, metas), {name: torch.device("meta") if name == "device" else each
                                            for name, each in _replaced(kwargs, metas).items()}
        out = func(*replaced[0], **replaced[1])
        return [tuple(each.shape) for each in tensors_in(out if isinstance(out, (tuple, list)) else (out,))]

    # where it does not know what was made, as the workspace of an LSTM, that grows in its first dimension
    return [[dim for dim, (n, twice) in enumerate(zip(once, more, strict=True)) if twice > n]
            if once == tuple(each.shape) else [0] * (each.ndim > 0)
            for each, once, more in zip(made, asked(1), asked(2), strict=True)]


def _replaced(tree, tensors):
    """Return nested lists, tuples and dicts with other tensors, in the order of `tensors_in`."""
    if isinstance(tree, torch.Tensor):
        return next(tensors)
    if isinstance(tree, dict):
        return {name: _replaced(each, tensors) for name, each in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_replaced(each, tensors) for each in tree)
    return tree


def _plain(tree):
    """Return what is no tensor as something that can be looked up."""
    if isinstance(tree, dict):
        return tuple((name, _plain(each)) for name, each in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(map(_plain, tree))
    return tree if isinstance(tree, (int, float, str, torch.dtype, type(None))) else type(tree)


def _cat_dim(args, kwargs, given):
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return dim % max(1, *(each.ndim for each in given))  # an empty one, as of a new cache, may have one dimension
