"""Which results are worth keeping: selective recomputation by operation.

Below autograd a dispatch mode sees every operation of a region. In the forward it keeps the outputs of those on the
save-list; in the recomputation it gives them back and the kernel does not run. So the list trades bytes (the outputs)
for time (their kernels), operation by operation: matrix products are the usual choice, since they are most of the time.

Kept bytes of a region = its input tensors + the outputs of the listed operations, as long as nothing changes them in
place; backward then holds those of them that autograd saved anyway, and no copy.
"""

from contextlib import contextmanager

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..common.rerun import has_drawn, random_state, set_random_state


def operations(save):
    """Return the OpOverloads that `save` names: `torch.ops.aten.mm` (all its overloads) or `torch.ops.aten.mm.default`.

    Raises TypeError for anything else, and ValueError for an operation that writes in place or returns a view: it has
    no output of its own to keep.
    """
    if isinstance(save, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, str)):
        raise TypeError(f"save={save}: expected a list of operations, save=[torch.ops.aten.mm]")
    found = set()
    for wanted in save:
        if isinstance(wanted, torch._ops.OpOverloadPacket):
            overloads = [getattr(wanted, name) for name in wanted.overloads()]
        elif isinstance(wanted, torch._ops.OpOverload):
            overloads = [wanted]
        else:
            raise TypeError(f"save has {wanted!r}: expected an operation, e.g. torch.ops.aten.mm")
        new = [overload for overload in overloads if _has_own_output(overload)]
        if not new:
            raise ValueError(f"save has {wanted}, which writes into an argument or returns a view of one: there is no "
                             "output of its own to keep; take it off the list")
        found.update(new)
    return frozenset(found)


def _has_own_output(overload):
    results = overload._schema.returns
    return bool(results) and not overload._schema.is_mutable and not any(r.alias_info for r in results)


class _SavedCall:
    """Holds the outputs of one call, their versions, and the random states after it if it drew numbers."""

    def __init__(self, operation, outputs, random):
        self.operation, self.random = operation, random
        self.outputs = pytree.tree_map_only(torch.Tensor, _alias, outputs)
        self._versions = self._now()

    def _now(self):
        return [leaf._version for leaf in pytree.tree_leaves(self.outputs) if isinstance(leaf, torch.Tensor)]

    def changed(self):
        """Tell whether something wrote into the outputs since they were kept."""
        return self._now() != self._versions


def _alias(tensor):
    """Return a tensor with the same storage and version counter, on which autograd does not set a `grad_fn`."""
    # a mode excludes this key; without it detach() would begin another version counter
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


class KeepOperations:
    """Hold the outputs that one region keeps, in the order of the calls."""

    def __init__(self, wanted):
        self._wanted, self._calls = wanted, None

    @contextmanager
    def keeping(self):
        """Keep outputs during the forward. One that was written to by its end is not kept: it is computed again."""
        calls = []
        with _Keeping(self._wanted, calls):
            yield
        self._calls = [None if call.changed() else call for call in calls]  # it no longer is what the operation gave

    @contextmanager
    def replaying(self):
        """Return kept outputs in the recomputation, once: a second one (after `retain_graph`) computes all of them."""
        calls, self._calls = self._calls, None  # from now on this recomputation alone holds them
        if calls is None:
            yield
        else:
            with _Replaying(self._wanted, calls):
                yield


class _Keeping(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, wanted, calls):
        super().__init__()
        self._wanted, self._calls = wanted, calls

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self._wanted:
            return func(*args, **kwargs)
        # only then: a state is 5,056 bytes on a CPU
        before = _random_states(args) if torch.Tag.nondeterministic_seeded in func.tags else {}
        outputs = func(*args, **kwargs)
        random = {device: random_state(device) for device, state in before.items() if has_drawn(device, state)}
        self._calls.append(_SavedCall(func, outputs, random))
        return outputs


def _random_states(args):
    devices = {leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)}
    return {"cpu" if device.type == "cpu" else device: random_state("cpu" if device.type == "cpu" else device)
            for device in devices if device.type != "meta"}


class _Replaying(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, wanted, calls):
        super().__init__()
        self._wanted, self._calls, self._next = wanted, calls, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in self._wanted or self._next >= len(self._calls):
            return func(*args, **kwargs)
        index, self._next = self._next, self._next + 1
        call, self._calls[index] = self._calls[index], None  # this list would keep the output alive through backward
        if call is None:
            return func(*args, **kwargs)
        if call.operation is not func:
            raise RuntimeError(f"recomputing reached {func} where the forward ran {call.operation}, call {index} of "
                               "the save-list: the function is not the same twice")
        if call.changed():
            raise RuntimeError(f"the output of {func} that was kept for the recomputation has been changed in place "
                               "since: clone it before, or take the operation off the save-list")
        for device, state in call.random.items():  # the kernel does not run: its numbers count as drawn
            set_random_state(device, state)
        return call.outputs
