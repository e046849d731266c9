"""What a tracker hears besides operations: modules, optimizers, saved tensors, resized storages.

PyTorch offers global hooks for modules and optimizers. It offers none for three things, so while a tracker is active
three public methods are wrapped, once, whatever the number of trackers:
- `saved_tensors_hooks.__enter__`, because only the innermost pair of hooks is called and a technique may install its
own;
- `autograd.Function.apply`, because a custom function may keep tensors on its `ctx` unseen;
- `UntypedStorage.resize_`, because it frees and takes memory and is not dispatched.
"""

import functools
import inspect
from contextlib import ExitStack, contextmanager
from types import ClassMethodDescriptorType

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.variable import Variable
from torch.nn.modules.module import (
    _global_forward_hooks_with_kwargs,
    register_module_buffer_registration_hook,
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...common.marks import meters, tell
from . import compiled
from .in_place import PYTHON, WatchedEngine

_installed = ExitStack()


def subscribe(tracker, first=False):
    """Send every event to `tracker` until `unsubscribe`; `first`: before those that listen already."""
    if not meters:
        try:
            _install()
        except BaseException:
            _installed.close()
            raise
    meters.insert(0 if first else len(meters), tracker)


def unsubscribe(tracker):
    """Stop sending to `tracker`. When the last one leaves, PyTorch is as it was."""
    meters.remove(tracker)
    if not meters:
        _installed.close()


def _install():
    handles = [
        register_module_forward_pre_hook(lambda module, args: tell("enter_module", module)),
        # (args, kwargs, output), or (args, output) after an exception
        register_module_forward_hook(lambda module, *given: tell("leave_module", module, given[:-1]),
                                     with_kwargs=True, always_call=True),
        register_module_parameter_registration_hook(lambda module, name, p: tell("own_parameter", p, name)),
        register_module_buffer_registration_hook(lambda module, name, b: tell("own_buffer", b)),
        register_optimizer_step_pre_hook(_enter_step),
        register_optimizer_step_post_hook(lambda optimizer, args, kwargs: tell("leave_step", optimizer)),
    ]
    for handle in handles:
        _installed.callback(handle.remove)
    _installed.callback(_global_forward_hooks_with_kwargs.pop, handles[1].id)  # `remove` leaves it behind
    _wrap(saved_tensors_hooks, "__enter__", _enter_saved_tensors_hooks)
    _wrap(torch.UntypedStorage, "resize_", _resize)
    _wrap(torch.autograd.Function, "apply", _apply)
    for name in ("frombuffer", "from_dlpack", "get_rng_state"):  # they make a tensor by no operation
        _wrap(torch, name, _make)
    _listen_to_autograd()
    _installed.enter_context(compiled.heard(functools.partial(tell, "tensor_made")))
    _installed.callback(setattr, Variable, "_execution_engine", Variable._execution_engine)
    Variable._execution_engine = WatchedEngine(functools.partial(tell, "ran"),
                                               functools.partial(tell, "backward_begins"))


def _enter_step(optimizer, args, kwargs):
    """Report that a step begins. A closure's forward and backward do not count as part of the step."""
    tell("enter_step", optimizer)
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def outside():
        tell("enter_closure")
        try:
            return closure()
        finally:
            tell("leave_closure")

    return ((args[0], outside, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": outside})


def _wrap(owner, name, wrapper):
    """Replace `owner.name` by `wrapper(original, …)` until uninstalled; a classmethod stays one."""
    own = owner.__dict__.get(name)  # None where the method is inherited: then taking ours away is enough
    original, found = getattr(owner, name), inspect.getattr_static(owner, name)
    of_class = isinstance(found, (classmethod, ClassMethodDescriptorType))  # Function.apply is the latter since 2.14

    def replacement(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    def replacement_of_class(cls, *args, **kwargs):
        return wrapper(found.__get__(None, cls), *args, **kwargs)

    wrapped = functools.wraps(original)(replacement_of_class if of_class else replacement)
    setattr(owner, name, classmethod(wrapped) if of_class else wrapped)
    _installed.callback((lambda: delattr(owner, name)) if own is None else (lambda: setattr(owner, name, own)))


def _resize(original, storage, size):
    before = storage.nbytes()
    result = original(storage, size)
    tell("resized", storage, before)
    return result


def _make(original, *args, **kwargs):
    tensor = original(*args, **kwargs)
    tell("tensor_made", original.__name__, tensor)
    return tensor


def _apply(original, *args, **kwargs):
    tell("enter_packing")
    try:
        outputs = original(*args, **kwargs)
    finally:
        tell("leave_packing")
    tell("function_returned", outputs)
    return outputs


# --- what autograd saves -------------------------------------------------------------------------------------------


def _listen_to_autograd():
    """Install our pair of hooks below any that a technique installs later; a pair that is there already still works."""
    already = torch._C._autograd._top_saved_tensors_default_hooks(True)
    ours = _observed(*already) if already else (_pack, _unpack)
    torch._C._autograd._push_saved_tensors_default_hooks(*ours)
    _installed.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
    if not already:
        _wrap(torch.autograd.graph, "disable_saved_tensors_hooks", _step_aside)


@contextmanager
def _step_aside(disable, message):
    """Take our hooks off while torch.func's transforms run, which refuse hooks; what these save is not noticed."""
    ours = torch._C._autograd._top_saved_tensors_default_hooks(True) == (_pack, _unpack)
    if ours:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        with disable(message):
            yield
    finally:
        if ours:
            torch._C._autograd._push_saved_tensors_default_hooks(_pack, _unpack)


def _pack(tensor):
    """Report that autograd saves `tensor` itself; return what it would keep: the storage, and a version to check."""
    tell("saved", tensor)
    # An output that its own node holds is a reference cycle, never freed: hold an alias instead.
    return (tensor if tensor.is_leaf else _alias(tensor)), tensor._version


def _alias(tensor):
    """Detach, past all modes where tensors are plain: no operation of the program's, and there is one for most."""
    if type(tensor) is not torch.Tensor or is_functorch_wrapped_tensor(tensor):
        return tensor.detach()
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(PYTHON)
    torch._C._dispatch_tls_set_dispatch_key_excluded(PYTHON, True)
    try:
        return tensor.detach()
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(PYTHON, before)


def _unpack(packed):
    tensor, version = packed
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{tensor.dtype} {list(tensor.shape)} is at version {tensor._version}, expected version {version}")
    return tensor


def _enter_saved_tensors_hooks(original, hooks):
    """Install a technique's hooks so that we see what goes into them and what comes out."""
    given = hooks.pack_hook, hooks.unpack_hook
    hooks.pack_hook, hooks.unpack_hook = _observed(*given)
    try:
        return original(hooks)
    finally:
        hooks.pack_hook, hooks.unpack_hook = given


def _observed(pack, unpack):
    def observed_pack(tensor):
        tell("offered", tensor)
        tell("enter_packing")
        try:
            packed = pack(tensor)
        finally:
            tell("leave_packing")
        tell("packed", packed)
        return packed

    return observed_pack, unpack
