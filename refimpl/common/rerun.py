"""What a function's result depends on besides its arguments, as it was at a moment: for techniques that run it again.

Random numbers and PyTorch's autocast are known here. A technique with a context of its own registers how to go back
into it (`register`). So those that recompute and those that change what operations do need not know each other.
"""

from contextlib import ExitStack, contextmanager

import torch

CPU = "cpu"
_registered = []


def register(capture):
    """Let every Environment call `capture()` when it is made, from now on. Returns `capture`, so it can be a decorator.

    `capture()` returns a function without arguments; that makes a context in which all is as it was at the capture.
    """
    _registered.append(capture)
    return capture


class Environment:
    """Capture the random states of the CPU and of the devices used, autocast, and what is registered, as they are now.

    - `fn`: what will run again; its parameters tell the devices used, if it is a module or a method of one.
    - `tensors`: its arguments, which tell the others.

    A random state is 5,056 bytes on a CPU and 16 on CUDA. A function that drew no number needs none of it: call
    `drop_unused` after its first run.
    """

    def __init__(self, fn, tensors):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        devices, kinds = [CPU], [CPU]
        if accelerator is not None:
            kinds.append(accelerator.type)
            devices += _devices_used(accelerator.type, fn, tensors)
        self._random = {device: random_state(device) for device in devices}
        self._autocast = {kind: _autocast(kind) for kind in kinds}
        self._contexts = [capture() for capture in _registered]

    def drop_unused(self):
        """Drop the random states that the first run did not change."""
        self._random = {device: state for device, state in self._random.items() if has_drawn(device, state)}

    @contextmanager
    def restored(self):
        """Open a context in which all is as it was. Afterwards random numbers go on as if none had been drawn in it."""
        # backward must not disturb the program's own numbers
        now = {device: random_state(device) for device in self._random}
        with ExitStack() as stack:
            for kind, options in self._autocast.items():
                if options != _autocast(kind):
                    enabled, dtype, cache = options
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache))
            for context in self._contexts:
                stack.enter_context(context())
            try:
                for device, state in self._random.items():
                    set_random_state(device, state)
                yield
            finally:
                for device, state in now.items():
                    set_random_state(device, state)


def _devices_used(kind, fn, tensors):
    """Return the devices of this kind with an argument or parameter of `fn`, and the current one if it is in use."""
    owner = getattr(fn, "__self__", fn)  # of a bound method
    if isinstance(owner, torch.nn.Module):
        tensors = [*tensors, *list(owner.parameters())[:1]]
    used = {tensor.device for tensor in tensors if tensor.device.type == kind}
    if getattr(torch.get_device_module(kind), "is_initialized", lambda: True)():
        used.add(torch.device(kind, torch.accelerator.current_device_index()))
    return used


def _autocast(kind):
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


def random_state(device):
    """Return the state of the device's generator: a tensor of bytes, on the CPU."""
    return torch.get_rng_state() if device == CPU else torch.get_device_module(device).get_rng_state(device)


def set_random_state(device, state):
    """Set the device's generator to `state`."""
    if device == CPU:
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def has_drawn(device, before):
    """Tell whether numbers were drawn on the device since it was in the state `before`. Fake tensors draw none."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return not fake and not torch.equal(before, random_state(device))
