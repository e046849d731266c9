"""What torch calls differently from version to version, or has no public name for."""

import torch
import torch.distributed as dist

# torch 2.13 gave these names to what 2.11 and 2.12 call …_into_tensor and …_tensor; there the old names warn.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# A context in which trackers see nothing: for what torch itself does inside a collective or around one, which is not
# the caller's. (gloo's reduce_scatter, say, reduces a copy of its argument; `memory.measure` sees that.)
unseen = torch._C._DisableTorchDispatch


def watched():
    """Whether a tracker sees each operation."""
    return torch._C._len_torch_dispatch_stack() > 0
