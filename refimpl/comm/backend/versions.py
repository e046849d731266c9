"""What has different names in torch's versions, or no public name."""

import operator
import sys
import time

import torch
import torch.distributed as dist

# torch 2.13 gave these names to what 2.11 and 2.12 call …_into_tensor and …_tensor; there the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A context in which trackers see nothing: for what torch itself allocates in a collective, which is not the caller's.
# (gloo's reduce_scatter, say, reduces a copy of its argument; `memory.measure` sees that.)
unseen = torch._C._DisableTorchDispatch
watched = torch._C._len_torch_dispatch_stack  # how many trackers see each operation


def unrecorded(call, *args):
    """Return `call(*args)`, which begins a collective; while a tracker is on, the profiler does not record it.

    Its record would hold a reference to the tracker, which gloo's thread drops at the collective's end, under the lock
    of the work. For that it needs the GIL; but a thread in `is_completed` holds the GIL, and waits for that lock.
    """
    if not watched():
        return call(*args)
    torch._C._autograd._enable_record_function(False)
    try:
        return call(*args)
    finally:
        torch._C._autograd._enable_record_function(True)


def lend(*tensors):
    """Return the tensors to give to torch, and the number of references to each, for `wait_for_release`.

    While a tracker is on, these are aliases that nobody else holds, so that only torch can add references to them.
    """
    lent = [tensor.detach() for tensor in tensors] if watched() else list(tensors)
    return lent, _references(lent) if watched() else None


def wait_for_release(lent, before, seconds=1):
    """Wait until torch has dropped its references to the tensors that it was lent.

    gloo's thread completes a collective, wakes the thread that waits for it, and drops its tensors a moment later. If
    the caller frees them in between they still live, and a tracker would read bytes that vary by chance.
    """
    deadline = time.monotonic() + seconds
    while before and any(map(operator.gt, _references(lent), before)) and time.monotonic() < deadline:
        time.sleep(0)


def owns_storage(tensor):
    """Whether a tensor is all of its storage, and no other tensor shares that.

    Autograd may give two parameters one storage for their gradients: to a and b of `a[None] + b[None]`, say."""
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) <= 2  # it, and `storage`


def _references(tensors):
    counts = []
    for tensor in tensors:  # to the Python object, the tensor and the storage
        storage = tensor.untyped_storage()._cdata
        counts += [sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(storage)]
    return counts
