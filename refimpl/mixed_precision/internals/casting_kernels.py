"""Between a program and autograd: for each operation of the tables a kernel that casts its arguments and goes on.

PyTorch sends every operation through a list of places ("dispatch keys"): autocast's, then autograd's, then the
device's. Ours are registered at a key for autocast that no CPU or CUDA tensor uses by itself; a region switches it on
for its thread. An operation that is in no table passes through in C++, at no cost. And since the key is below Python,
our kernels also see what PyTorch itself calls (the matmul of an einsum, the parts of a composite norm). A
`TorchFunctionMode`, which sees the calls that Python makes, would miss those, and would cost time at every call.
"""

import functools
import threading

import torch
from torch._C import DispatchKeySet

from ...common.autocast_keys import REGIONS as KEY
from . import lists
from .autocast_regions import state

_lock = threading.Lock()
_libraries = []  # registrations end when these objects are freed
_registered = set()  # operations


def register(device_type):
    """Register the kernels of a device's table, once a process. They do nothing until a region switches the key on.

    One device at a time, so that without a GPU the operations that only CUDA's table names cost nothing either.
    """
    with _lock:
        if not _libraries:
            everywhere = torch.library.Library("_", "IMPL")
            everywhere.fallback(torch.library.fallthrough_kernel, KEY.name)  # operations of no table pass in C++
            _libraries.extend((everywhere, torch.library.Library("aten", "IMPL")))
        for name in sorted(set(lists.POLICIES[device_type]) - _registered):
            op = operation(name)
            if op is not None:
                policies = {device: table[name] for device, table in lists.POLICIES.items() if name in table}
                _libraries[1].impl(name, kernel(op, policies), KEY.name, with_keyset=True)
            _registered.add(name)


def operation(name):
    """Return `torch.ops.aten`'s operation `name` or `name.overload`; None if this version of PyTorch has none."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def kernel(op, policies):
    """Return what runs in place of `op`: it casts arguments as the open regions say, then calls `op` past our key."""
    apply = {device: POLICIES[policy](op) for device, policy in policies.items()}
    closed, below = DispatchKeySet(KEY), torch._C._dispatch_keyset_full_after(KEY)

    def cast_and_call(keys, *args, **kwargs):
        regions = [region for region in state().active if region.device_type in apply]
        if not regions:  # only in another device's table: call it as it is; operations inside may be in this one's
            return op.redispatch(keys & below, *args, **kwargs)
        call = op
        with torch._C._ExcludeDispatchKeyGuard(closed):
            for region in regions:
                call, args, kwargs = apply[region.device_type](region, call, args, kwargs)
            return call(*args, **kwargs)

    _leave_to_python(cast_and_call)
    return cast_and_call


def _leave_to_python(function):
    """Tell torch.compile to trace neither `function` nor what it calls.

    (`torch.compiler.disable` would wrap it, and the wrapper costs time at every operation.)
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


# --- the policies: (operation) -> (region, operation, args, kwargs) -> what to call, on what --------------------------


def each(region, items, dtype):
    """Return `items` as a list, with all tensors in it, also in nested lists and tuples, cast to `dtype`."""
    return [region.cast(item, dtype) if isinstance(item, torch.Tensor) else
            each(region, item, dtype) if isinstance(item, (list, tuple)) else item for item in items]


def everything(region, args, kwargs, dtype):
    """Return (args, kwargs) with everything cast to `dtype`."""
    return (each(region, args, dtype),
            dict(zip(kwargs, each(region, kwargs.values(), dtype), strict=True)) if kwargs else kwargs)


def low(op):
    """Make a policy that casts all arguments to the region's dtype."""
    return lambda region, call, args, kwargs: (call, *everything(region, args, kwargs, region.dtype))


def fp32(op):
    """Make a policy that casts all arguments to fp32."""
    return lambda region, call, args, kwargs: (call, *everything(region, args, kwargs, torch.float32))


def eligible(region, x):
    """Tell whether autocast may change the type of `x`."""
    return (isinstance(x, torch.Tensor) and getattr(x, region.on) and x.is_floating_point()
            and x.dtype is not torch.float64)


WITH_DTYPE = {"Scalar": "ScalarOpt_dtype", "ScalarOpt_dim": "ScalarOpt_dim_dtype"}  # overloads of norm


def fp32_result(op):
    """Make a policy that adds `dtype=torch.float32` if no dtype is given, for an overload of `op` that takes one."""
    names = [argument.name for argument in op._schema.arguments]
    if "dtype" in names:
        place, other = names.index("dtype"), op
    else:
        place, other = len(names), getattr(op.overloadpacket, WITH_DTYPE[op._overloadname])
    defaults = [argument.default_value for argument in op._schema.arguments]

    def apply(region, call, args, kwargs):
        given = args[place] if len(args) > place else kwargs.get("dtype")
        if given is not None or not eligible(region, args[0]):  # who names a dtype has chosen it
            return call, args, kwargs
        if other is not op:
            args = (*args, *defaults[len(args):])
        return other, args[:place], {**kwargs, "dtype": torch.float32}

    return apply


def widest(region, tree, found):
    """Return the widest of the dtype `found` and those of the tensors in `tree` that autocast may change."""
    if eligible(region, tree):
        return torch.promote_types(found, tree.dtype)
    if isinstance(tree, (list, tuple)):
        return functools.reduce(lambda so_far, item: widest(region, item, so_far), tree, found)
    return found


def promote(op):
    """Make a policy that casts all arguments to the widest dtype among them and the region's."""

    def apply(region, call, args, kwargs):
        dtype = widest(region, list(kwargs.values()), widest(region, args, region.dtype))
        return call, *everything(region, args, kwargs, dtype)

    return apply


def refuse(op):
    """Make a policy that raises an error, which names the operation to use instead."""

    def apply(region, call, args, kwargs):
        raise RuntimeError(f"{op} is not safe in {region.dtype}: take binary_cross_entropy_with_logits of the values "
                           "before the sigmoid, or autocast(enabled=False) around it and x.float()")

    return apply


POLICIES = {lists.LOW: low, lists.FP32: fp32, lists.FP32_RESULT: fp32_result, lists.PROMOTE: promote,
            lists.REFUSE: refuse}
