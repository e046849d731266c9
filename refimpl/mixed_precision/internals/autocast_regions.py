"""The autocast regions of a thread: which are open, and the dtype that each device's operations take in them.

The state is in PyTorch's thread-local storage, beside the switch that lets operations reach our kernels. A new thread
has neither; autograd's own threads, which run the backward of CUDA tensors, inherit both from the thread that called
`backward`. A `threading.local` would not be inherited.
"""

import ctypes
import sys
import weakref
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...common.autocast_keys import REGIONS as KEY

_TLS_KEY = "refimpl.mixed_precision"


class AutocastRegion:
    """Hold one open `with autocast(…)`: what it says for `device_type`, and the casts of weights made in it.

    `dtype` is None where it is disabled. `casts`: id of a weight -> (weak references to it and its storage, what it
    looked like, cast); regions inside one another with the same dtype share it, and the outermost empties it.
    """

    __slots__ = ("casts", "device_type", "dtype", "on", "owner", "shared")

    def __init__(self, owner, device_type, dtype, casts=None, shared=False):
        self.owner, self.device_type, self.dtype, self.casts, self.shared = owner, device_type, dtype, casts, shared
        self.on = "is_cuda" if device_type == "cuda" else "is_cpu"  # the property of its tensors

    def cast(self, x, dtype):
        """Return `x` in `dtype` if it is a floating-point tensor of this device, and not float64, which was chosen."""
        if x.dtype is dtype or not getattr(x, self.on) or not x.is_floating_point() or x.dtype is torch.float64:
            return x
        if self.casts is None or dtype is not self.dtype or not (x.requires_grad and x.is_leaf) or x._is_view():
            return x.to(dtype)
        return self._cast_once(x, dtype)

    def _cast_once(self, weight, dtype):
        """Return the cached cast, unless the weight was written to or got another storage since.

        A cast made under `no_grad` has no graph, so the grad mode must agree too. The weak reference to the storage
        keeps its address from being reused, but not its bytes alive.
        """
        if weight.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(weight):
            return weight.to(dtype)  # without a version or a storage it cannot be cached
        now = (weight._version, weight.untyped_storage()._cdata, weight.storage_offset(), weight.shape,
               weight.stride(), torch.is_grad_enabled())
        reference, _, then, cast = self.casts.get(id(weight), (None, None, None, None))
        if reference is None or reference() is not weight or then != now:
            cast = weight.to(dtype)
            self.casts[id(weight)] = weakref.ref(weight), StorageWeakRef(weight.untyped_storage()), now, cast
        return cast


class State(NamedTuple):
    """`stack`: the open regions, outermost first. `active`: the innermost of each device, if enabled, CUDA first."""

    stack: tuple = ()
    active: tuple = ()


NONE = State()


def _stash(value):
    """Store the new object `value` in the thread's state. (PyTorch 2.11 takes no reference, but drops one later.)"""
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(_TLS_KEY, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def state():
    """Return the State of this thread."""
    return torch._C._get_obj_in_tls(_TLS_KEY) if torch._C._is_key_in_tls(_TLS_KEY) else NONE


def current(device_type):
    """Return the innermost open region for `device_type`, or None."""
    return next((region for region in reversed(state().stack) if region.device_type == device_type), None)


def set_stack(stack):
    """Make `stack` this thread's regions. Operations come to our kernels while one of them is enabled."""
    innermost = {region.device_type: region for region in stack}
    active = tuple(innermost[device] for device in ("cuda", "cpu")
                   if device in innermost and innermost[device].dtype is not None)
    _stash(State(tuple(stack), active))
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not active)
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, bool(active))
