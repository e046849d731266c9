"""Recomputation by saved-tensor hooks: autograd keeps placeholders, which a region fills when the first is unpacked.

    forward    every tensor that autograd would save becomes a Placeholder; the region keeps the inputs of `fn` alone
    backward   the first placeholder that is unpacked makes the region run `fn` once more, up to the last tensor that
               is still needed; each placeholder gets its tensor, gives it to backward once, and drops it

Kept bytes of a region = its input tensors, + the random state if it drew numbers (5,056 on a CPU, 16 on CUDA).
"Training Deep Nets with Sublinear Memory Cost" (Chen et al. 2016), section 3, has the idea; the hooks are described in
PyTorch's tutorial on saved tensors.
"""

import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from ..common.rerun import Environment
from ..others import ask_of_others
from .save_list import KeepOperations, operations

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

OPTIONS = ("early_stop", "save", "recompute_context", "keep")  # of `checkpoint`; other keywords go to the function
OPTIONS_OF_TORCH = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check")  # refused
ADVICE = ("the function must do the same twice; look for a branch on a counter or a mode, for state that the first "
          "call changes, and for random numbers that are not torch's own")


class RecomputeError(RuntimeError):
    """Raised if the recomputation saves other tensors than the forward did, so `fn` did not do the same twice."""


def checkpoint(fn: Callable[..., Any], *args: Any, early_stop: bool = True, save: Iterable[Any] = (),
               recompute_context: "Callable[[], AbstractContextManager[Any]]" = nullcontext,
               keep: Callable[[torch.Tensor], bool] | None = None, **kwargs: Any) -> Any:
    """Call `fn(*args, **kwargs)`; autograd keeps only the input tensors, and backward computes the rest again.

    Arguments may be anything, nested in lists, tuples and dicts; tensors among them are the region's inputs. Gradients
    are bit for bit those without it: random numbers and autocast (PyTorch's and `mixed_precision`'s) are as they were
    in the forward. Without grad mode it is a plain call.

    What the function reads from elsewhere is not kept for it: numbers of NumPy, `random` or a `torch.Generator` of your
    own (draw them before and pass them as arguments), and parameters, which must not change before backward.

    - `early_stop`: end the recomputation with the last tensor that backward needs. False runs `fn` to its end, and then
      also notices tensors that it would save after that one.
    - `save`: operations (`[torch.ops.aten.addmm, …]`) whose outputs are kept and not computed again; see
      `save_list`.
    - `recompute_context`: makes a context to recompute in; see `frozen_statistics`.
    - `keep`: an object that keeps the region's input tensors in another form until the recomputation. For each of them
      `keep.pack(tensor)` returns None to leave it as it is, or `(kept, context)`: a tensor that shares no memory with
      it, and anything that `keep.unpack(kept, context)` needs to return it bit for bit, with shape, strides and device.

    torch.compile breaks its graph around a region and leaves what is inside uncompiled (fullgraph=True is an error). To
    compile that, too, give `torch.compile(fn)`.

    Every other keyword goes to `fn`. If `fn` has keywords of these names itself, give it as a `functools.partial`.

    Raises TypeError if `fn` is not callable, if `keep` has no `pack` or `unpack`, and for an option of
    `torch.utils.checkpoint`, which a function with `**kwargs` would swallow. Raises ValueError for a cache of
    transformers among the arguments (`use_cache=False`). In backward, raises RecomputeError, naming the first tensor
    that differs in shape, dtype or device or the count of them, and RuntimeError for an argument that was changed in
    place.
    """
    return checkpointed(fn, args, kwargs, early_stop=early_stop, save=save, recompute_context=recompute_context,
                        keep=keep)


def checkpointed(fn, args, kwargs, *, early_stop=True, save=(), recompute_context=nullcontext, keep=None):
    """Do what `checkpoint` does, with the function's arguments apart from the options."""
    if torch.compiler.is_compiling() and torch.is_grad_enabled():
        return outside_of_graph(checkpointed, fn, args, kwargs, early_stop=early_stop, save=save,
                                recompute_context=recompute_context, keep=keep)
    if not callable(fn):
        raise TypeError(f"checkpoint({type(fn).__name__}, …): expected a function and its arguments, as in "
                        "checkpoint(block, x), not what it returned")
    refuse_options_of_torch(kwargs, OPTIONS)
    check_keep(keep)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    refuse_caches((*args, *kwargs.values()))
    # held by its placeholders alone, from here on
    region = RecomputedRegion(fn, args, kwargs, early_stop, operations(save), recompute_context, keep)
    return region.forward(args, kwargs)


@torch._disable_dynamo
def outside_of_graph(fn, *args, **kwargs):
    """Call `fn` with all that it calls as plain Python: torch.compile breaks its graph here.

    A graph has no hooks for what it saves. PyTorch's own checkpoint can be part of one, but with backend="eager" it
    draws other random numbers in backward than in forward, and says nothing.
    """
    return fn(*args, **kwargs)


def refuse_options_of_torch(kwargs, known=()):
    """Raise TypeError if the keywords of a function hold an option of `torch.utils.checkpoint`."""
    for name in OPTIONS_OF_TORCH:
        if name in kwargs:
            here = f"; the options here are {', '.join(known)}" if known else ""
            raise TypeError(f"{name}={kwargs[name]!r} is an option of torch.utils.checkpoint: leave it out{here}")


def refuse_caches(arguments):
    """Raise ValueError for a cache of transformers, which a layer changes: both of its calls would add their keys."""
    for value in arguments:
        if ask_of_others("cache", value):
            raise ValueError(f"{type(value).__name__} is a cache, to which a layer adds its keys: a recomputation "
                             "would add them a second time. Training needs none: call the model with use_cache=False, "
                             "or set model.config.use_cache = False")


def check_keep(keep):
    """Raise TypeError unless `keep` is None or has the methods `pack` and `unpack`."""
    for name in () if keep is None else ("pack", "unpack"):
        if not callable(getattr(keep, name, None)):
            raise TypeError(f"keep={keep!r} has no method {name}: expected an object with pack(tensor) and "
                            "unpack(kept, context), such as PartitionedInputs(comm); leave it out to keep inputs whole")


class Placeholder:
    """Takes a saved tensor's place in autograd. `tensor` is set from the recomputation until backward takes it."""

    __slots__ = ("region", "tensor", "__weakref__")

    def __init__(self, region):
        self.region, self.tensor = region, None


# `reshape` makes the first, or the second where a dispatch mode (a tracker) looks on; both are one view.
ONE_NODE = {"ReshapeAliasBackward0": "ViewBackward0"}


class Description(NamedTuple):
    """Describes what must be the same in forward and recomputation of a saved tensor.

    Values are not compared, since that would need both in memory. Operations that save nothing are not noticed.
    """

    dtype: torch.dtype
    shape: tuple
    device: torch.device
    made_by: str | None  # its autograd node; in the recomputation the region's inputs have none

    @classmethod
    def of(cls, tensor):
        """Describe a tensor that autograd is about to save."""
        node = tensor.grad_fn
        name = node and type(node).name(node)
        return cls(tensor.dtype, tuple(tensor.shape), tensor.device, ONE_NODE.get(name, name))

    def fits(self, other):
        """Tell whether a recomputed tensor may stand in this one's place."""
        # a region's input has a node in the forward alone
        return self[:3] == other[:3] and (self.made_by == other.made_by or None in (self.made_by, other.made_by))

    def __str__(self):
        made = f", made by {self.made_by}" if self.made_by else ""
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)} on {self.device}{made}"


class RecomputedRegion:
    """Holds one call of `fn`: its inputs, its environment, and weak references to the placeholders.

    Placeholders hold the region, not the other way round. So the region is freed with the last node of its graph.
    """

    def __init__(self, fn, args, kwargs, early_stop, kept_operations, recompute_context, keep=None):
        self._fn, self._early_stop, self._recompute_context = fn, early_stop, recompute_context
        leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._environment = Environment(fn, [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])
        self._inputs = [_Input(leaf, keep) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._kept = KeepOperations(kept_operations) if kept_operations else None
        self._placeholders, self._descriptions = [], []  # one each for every saved tensor, in order
        self._lock = threading.RLock()  # autograd has one thread for each CUDA device

    def forward(self, args, kwargs):
        """Run `fn` with placeholders for all that autograd would save."""
        with saved_tensors_hooks(self._pack, _unpack), self._kept.keeping() if self._kept else nullcontext():
            outputs = self._fn(*args, **kwargs)
        self._environment.drop_unused()  # a state that nobody drew from need not be kept
        return outputs

    def _pack(self, tensor):
        placeholder = Placeholder(self)
        self._placeholders.append(weakref.ref(placeholder))  # weak: autograd alone decides which are still needed
        self._descriptions.append(Description.of(tensor))
        return placeholder

    def pop_tensor(self, placeholder):
        """Return the tensor of `placeholder`, once. If it is not there, all of the region's are recomputed."""
        with self._lock:
            if placeholder.tensor is None:
                self._recompute()
            tensor, placeholder.tensor = placeholder.tensor, None
            if torch._C._current_graph_task_id() == -1:  # not in a backward: a node's saved tensor is inspected
                self._forget()
            return tensor

    def _recompute(self):
        args, kwargs = pytree.tree_unflatten(
            [leaf.get() if isinstance(leaf, _Input) else leaf for leaf in self._inputs], self._structure)
        recomputation = _Recomputation(self._placeholders, self._descriptions, self._early_stop)
        try:
            # backward runs without grad
            with self._environment.restored(), self._recompute_context(), torch.enable_grad():
                with saved_tensors_hooks(recomputation.pack, _same):
                    with self._kept.replaying() if self._kept else nullcontext():
                        self._fn(*args, **kwargs)
            recomputation.ended()  # an early stop does not come here
        except _Enough as enough:
            if enough.recomputation is not recomputation:  # an outer region's, whose recomputation ran this one
                raise
        except BaseException:
            self._forget()  # so that a retry recomputes everything
            raise
        if torch._C._current_graph_task_id() != -1:  # at the end of this backward, drop what it did not take
            region = weakref.ref(self)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: _forget(region()))

    def _forget(self):
        for placeholder in filter(None, (ref() for ref in self._placeholders)):
            placeholder.tensor = None


def _forget(region):
    if region is not None:
        region._forget()


def _unpack(placeholder):
    return placeholder.region.pop_tensor(placeholder)


def _same(tensor):  # the recomputation's own graph is never gone back through
    return tensor


class _Enough(Exception):
    """Ends a recomputation early. It is an Exception, since modules call their `always_call` hooks only for those."""

    def __init__(self, recomputation):
        super().__init__("the recomputation made the last tensor that backward needs")
        self.recomputation = recomputation


class _Recomputation:
    """Runs `fn` again. The n-th tensor that autograd saves goes to the n-th placeholder, if that still exists."""

    def __init__(self, placeholders, descriptions, early_stop):
        self._placeholders, self._expected = [ref() for ref in placeholders], descriptions[:]
        # those after it have been freed: nobody needs them
        self._last = max(i for i, placeholder in enumerate(self._placeholders) if placeholder is not None)
        self._early_stop, self._count = early_stop, 0

    def pack(self, tensor):
        """Give a tensor that autograd saves in the recomputation to its placeholder."""
        index, self._count = self._count, self._count + 1
        if index < len(self._placeholders):
            expected, found = self._expected[index], Description.of(tensor)
            if not expected.fits(found):
                raise RecomputeError(f"tensor {index} of the {len(self._placeholders)} that autograd saves is {found} "
                                     f"in the recomputation, and was {expected} in the forward: {ADVICE}")
        tensor = tensor.detach() if tensor.requires_grad else tensor  # else a cycle: its node may hold the placeholder
        if index <= self._last and self._placeholders[index] is not None:
            self._placeholders[index].tensor = tensor
            self._placeholders[index] = None
        if index == self._last and self._early_stop:
            raise _Enough(self)
        return tensor

    def ended(self):
        """Raise RecomputeError unless `fn` saved as many tensors as before, or caught the early stop itself."""
        if self._count != len(self._expected) and not (self._early_stop and self._count > self._last):
            differs = min(self._count, len(self._expected))
            which = f"tensor {differs}, {self._expected[differs]}, is missing" if differs == self._count else (
                f"tensor {differs} was not there before")
            raise RecomputeError(f"autograd saved {len(self._expected)} tensors in the forward and {self._count} in "
                                 f"the recomputation: {which}; {ADVICE}")


class _Input:
    """Keeps a tensor argument until the recomputation.

    If saved-tensor hooks are active around the region (a checkpoint around this one, a technique that stores tensors
    elsewhere, a tracker), they keep it, as they would for any operation. With `keep` they get what it made of the
    tensor, so a region inside another one, in whose forward nothing is kept, keeps no part either.
    """

    def __init__(self, tensor, keep=None):
        self._requires_grad, self._keep = tensor.requires_grad, keep
        packed = None if keep is None else keep.pack(tensor)
        tensor, self._context = (tensor, None) if packed is None else packed
        self._whole, self._version = packed is None, tensor._version
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        # detach(): if `fn` writes into its input, the input would hold the graph, which holds the region.
        self._packed, self._unpack = (hooks[0](tensor), hooks[1]) if hooks else (tensor.detach(), None)

    def get(self):
        """Return the tensor that `fn` got, as a leaf. Raises RuntimeError if it was changed in place."""
        tensor = self._unpack(self._packed) if self._unpack else self._packed
        if self._unpack is None and tensor._version != self._version:
            raise RuntimeError(f"an argument of checkpoint, {Description.of(tensor)}, has been changed in place since: "
                               f"it is at version {tensor._version}, expected {self._version}; clone it before")
        tensor = tensor if self._whole else self._keep.unpack(tensor, self._context)
        return tensor.detach().requires_grad_(self._requires_grad)
