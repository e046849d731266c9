"""What has different names in torch's versions, or no public name."""

import operator
import sys
import time

import torch
import torch.distributed as dist

# torch 2.11 and 2.12 call these all_gather_into_tensor and reduce_scatter_tensor. In 2.13 those names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A context that hides from trackers what torch itself allocates in a collective. (gloo's reduce_scatter, for example,
# copies its argument. `memory.measure` sees that.)
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
    """Tell whether a tensor fills its storage, and no other tensor shares it.

    Autograd may give the gradients of two parameters one storage, as for a and b in `a[None] + b[None]`.
    """
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and torch._C._storage_Use_Count(storage._cdata) <= 2  # held by both names


def _references(tensors):
    counts = []
    for tensor in tensors:  # of the Python object, of the C++ tensor and of its storage
        storage = tensor.untyped_storage()._cdata
        counts += [sys.getrefcount(tensor), tensor._use_count(), torch._C._storage_Use_Count(storage)]
    return counts
