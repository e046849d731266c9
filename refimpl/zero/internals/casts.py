"""Casts of whole parameters under autocast: they are released and restored with the parameters.

Autocast casts a weight to 16 bits for its matrix product. Autograd keeps the cast until backward, and autocast's cache
keeps it until the region ends. At stage 3 the casts of all units would stay, 2 bytes for each element of a matrix, long
after the parameters themselves are in shards again. But a cast can be made again from its parameter, and that is
gathered for the unit's backward anyway. So a cast has bytes only while its parameter is whole. In bytes, with Ψ_u
elements that are cast in unit u, of e bytes each, and one unit whole at a time:

    kept from forward to backward       Σ_u e · Ψ_u
    released with the parameters        max_u e · Ψ_u       and none between forward and backward

A cast is released as a parameter is (see `zero3`), by resizing its storage to no bytes. What autograd saved of it, and
what the cache holds, are the same tensors afterwards. So the graph is as it was, gradients are equal to the bit, and a
program's own hooks on saved tensors see what they would see.

Casts are found by a kernel for `_to_copy`, the operation that casts, at a dispatch key that no tensor on a CPU or a GPU
uses by itself. It runs only around the forward of units that are called in a region of autocast. While an autocast
makes a cast, its own dispatch key is excluded. That tells its casts from a program's own, `weight.bfloat16()`, which
are left alone. (In a region that is disabled inside another one they look alike, so such a cast must not be read after
its unit has ended.)
"""

import functools
import threading
import weakref
from collections import defaultdict

import torch
from torch._C import DispatchKey
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...common.autocast_keys import CASTS as KEY
from ...common.autocast_keys import REGIONS

_here = threading.local()  # `watching`: the Casts of the units whose forward is running


class Casts:
    """Releases and restores the casts that autocast makes of whole parameters.

    `whole` below is a tensor that whole parameters are views of. Its storage stays the same object, and has bytes while
    they are gathered. Around each unit's forward, in its thread:

        casts.restore(whole)    once `whole` has its values, and before anything computes with them; in backward, too
        casts.begin()           then casts are watched …
        casts.end()             … until the forward has ended, or raised
        casts.release(whole)    when `whole` is released
    """

    def __init__(self):
        self._of = defaultdict(list)  # id of the storage of whole parameters → casts; only while they are whole
        self._away = {}  # the same, while they are released

    def begin(self):
        """Watch for casts in this thread, if a region of autocast is open; calls nest."""
        _watching().append(self if _is_open() else None)
        if _is_open():
            _register()
            _listen(True)

    def end(self):
        """End what the last `begin` began."""
        listening = any(_watching())
        if _watching():
            _watching().pop()
        if listening:
            _listen(any(_watching()))

    def restore(self, whole):
        """Make the casts of `whole`'s parameters again that someone still holds."""
        key = whole.untyped_storage()._cdata
        self._of[key] += [cast for cast in self._away.pop(key, ()) if cast.restore()]

    def release(self, whole):
        """Free the bytes of the casts of `whole`'s parameters."""
        key = whole.untyped_storage()._cdata
        if kept := [cast for cast in self._of.pop(key, ()) if cast.release()]:
            self._away[key] = [*self._away.get(key, ()), *kept]

    def nbytes(self):
        """Return the bytes of the casts that are whole now."""
        return sum(cast.nbytes() for casts in self._of.values() for cast in casts)

    def note(self, parameter, cast):
        """Note that autocast made `cast` of `parameter`, or of a view of it."""
        key = parameter.untyped_storage()._cdata
        if key in self._of:
            self._of[key].append(ParameterCast(parameter, cast))


class ParameterCast:
    """One cast of a parameter. It keeps neither the tensor nor its storage alive: autograd and autocast do."""

    def __init__(self, parameter, cast):
        self._parameter = parameter.detach()  # of the parameter's storage, whatever its `data` is later
        self._cast, self._storage = weakref.ref(cast), weakref.ref(cast.untyped_storage())
        self._layout, self._bytes = (cast.storage_offset(), cast.shape, cast.stride()), cast.untyped_storage().nbytes()
        self._dtype = cast.dtype

    def nbytes(self):
        """Return its bytes, 0 if nobody holds it."""
        storage = self._storage()
        return storage.nbytes() if storage is not None else 0

    def release(self):
        """Free its bytes. Return whether anyone holds it. It then reads as NaN: at address 0 it would crash."""
        storage, cast = self._storage(), self._cast()
        if storage is None:
            return False
        storage.resize_(0)
        if cast is not None and not isinstance(cast, FakeTensor):
            cast.data = _nan(cast.dtype, cast.device).expand(cast.shape)
        return True

    def restore(self):
        """ParameterCast the parameter again, into the same storage. Return whether anyone holds it."""
        storage, cast = self._storage(), self._cast()
        if storage is None and cast is None:
            return False
        if storage is None:  # no view of the cast was saved, so that the storage went when it got another
            storage = torch.empty(self._bytes, dtype=torch.uint8, device=cast.device).untyped_storage()
            self._storage = weakref.ref(storage)
        storage.resize_(self._bytes)
        if not isinstance(self._parameter, FakeTensor):  # those have no values
            again = torch.empty(0, dtype=self._dtype, device=self._parameter.device).set_(storage, *self._layout)
            again.copy_(self._parameter)
            if cast is not None:
                cast.data = again
        return True


def cast_bytes(units, itemsize=2):
    """Predict the most bytes of casts at once, when one unit is whole at a time: max_u e · Σ_{p in u} elements of p.

    `units`: for each unit, the parameters that autocast casts, such as the weights and biases of its linear layers.
    e = `itemsize`, of the dtype that they are cast to. Without `Casts` it would be the sum over all units.
    """
    return max(itemsize * sum(p.numel() for p in dict.fromkeys(parameters)) for parameters in units)


# --- below Python ----------------------------------------------------------------------------------------------------


def _watching():
    if not hasattr(_here, "watching"):
        _here.watching = []
    return _here.watching


def _is_open():
    """Tell whether some region of autocast is open in this thread, ours or torch's."""
    return (torch._C._dispatch_tls_is_dispatch_key_included(REGIONS) or torch.is_autocast_enabled("cpu")
            or torch.is_autocast_enabled("cuda"))


def _listen(on):
    torch._C._dispatch_tls_set_dispatch_key_included(KEY, on)
    torch._C._dispatch_tls_set_dispatch_key_excluded(KEY, not on)


@functools.cache
def _register():
    """Register the kernel, once a process. Returns what keeps it registered."""
    everywhere, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everywhere.fallback(torch.library.fallthrough_kernel, KEY.name)
    below, cast = torch._C._dispatch_keyset_full_after(KEY), torch.ops.aten._to_copy.default

    @torch.compiler.disable
    def cast_and_tell(keys, x, **options):
        if not isinstance(x, torch.Tensor):  # a number in an operation of C++, as in a mean, has become Python's
            return cast.redispatch(keys & below, torch.scalar_tensor(x, dtype=_dtype_of(x)), **options)
        y = cast.redispatch(keys & below, x, **options)
        if _by_autocast(x) and x.dtype != y.dtype and not is_functorch_wrapped_tensor(x) and x.layout is torch.strided:
            for casts in filter(None, dict.fromkeys(_watching())):
                casts.note(x, y)
        return y

    aten.impl("_to_copy", cast_and_tell, KEY.name, with_keyset=True)
    return everywhere, aten


def _dtype_of(number):
    """Return the dtype that C++ gives to a number."""
    kinds = (((bool, torch.SymBool), torch.bool), ((int, torch.SymInt), torch.int64),
             ((float, torch.SymFloat), torch.float64))
    return next((dtype for types, dtype in kinds if isinstance(number, types)), torch.complex128)


def _by_autocast(x):
    """Tell whether an autocast makes this call: its key is excluded while a region of it is open."""
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
    if torch._C._dispatch_tls_is_dispatch_key_included(REGIONS) and excluded(REGIONS):
        return True
    nested = torch.autocast_increment_nesting() > 1
    torch.autocast_decrement_nesting()
    return nested and excluded(DispatchKey.AutocastCUDA if x.is_cuda else DispatchKey.AutocastCPU)


@functools.cache
def _nan(dtype, device):
    """Return one element, which all released casts of a dtype expand."""
    with torch.inference_mode(False):
        return torch.full((), torch.nan, dtype=dtype, device=device)
