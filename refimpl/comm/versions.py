"""What torch calls differently from version to version, or has no public name for."""

import operator
import sys
import time

import torch
import torch.distributed as dist

# torch 2.13 gave these names to what 2.11 and 2.12 call …_into_tensor and …_tensor; there the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A context in which trackers see nothing: for what torch itself does inside a collective or around one, which is not
# the caller's. (gloo's reduce_scatter, say, reduces a copy of its argument; `memory.measure` sees that.)
unseen = torch._C._DisableTorchDispatch


watched = torch._C._len_torch_dispatch_stack  # how many trackers see each operation


def unrecorded(call, *args):
    """`call(*args)`, which begins a collective: none of the profiler's where a tracker looks on.

    What a profiler wants to do at a collective's end holds on to the tracker. gloo's thread drops it under the lock of
    the work, and needs the interpreter for that, which whoever asks `is_completed` has while waiting for that lock.
    """
    if not watched():
        return call(*args)
    torch._C._autograd._enable_record_function(False)
    try:
        return call(*args)
    finally:
        torch._C._autograd._enable_record_function(True)


def lend(*tensors):
    """`tensors` for torch to work on, and how many references there are to each, for `let_go`.

    Where a tracker is interested, aliases that nobody else holds, so that only torch can add references to them.
    """
    lent = [tensor.detach() for tensor in tensors] if watched() else list(tensors)
    return lent, _references(lent) if watched() else None


def let_go(lent, before, seconds=1):
    """Return when torch has dropped what was lent to it.

    A thread of gloo's ends a collective, wakes who waits for it, and drops its tensors a moment later. Whoever frees
    them in between has freed nothing yet, and a tracker would read bytes that come and go by chance.
    """
    deadline = time.monotonic() + seconds
    while before and any(map(operator.gt, _references(lent), before)) and time.monotonic() < deadline:
        time.sleep(0)


def owns_storage(tensor):
    """Whether no other tensor looks at its storage, and it at all of it.

    Autograd may hand one storage to two parameters as their gradients: to a and b of `a[None] + b[None]`, say."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) <= 2  # it, and `storage`


def _references(tensors):
    counts = []
    for tensor in tensors:  # to the Python object, the tensor and the storage
        storage = tensor.untyped_storage()._cdata
        counts += [sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(storage)]
    return counts
