"""What a chunk's forward depends on besides its tokens: random numbers and autocast, as they were at a moment."""

from contextlib import ExitStack, contextmanager

import torch


class Environment:
    """The random states of the CPU and of the model's device, and autocast. A random state is 5,056 bytes on a CPU and
    16 on CUDA; `settle`, after the forward, lets go of those that did not change."""

    def __init__(self, model, device):
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # they draw nothing
        self._devices = [] if fake else [device] if device.type == "cpu" else [torch.device("cpu"), device]
        self._random = [(each, _state(each)) for each in self._devices if model.training]
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                          for kind in {"cpu", device.type}]

    def settle(self):
        """The forward is done."""
        self._random = [(device, state) for device, state in self._random if not torch.equal(state, _state(device))]

    @contextmanager
    def restored(self):
        """A context in which both are as they were; afterwards random numbers go on as if none had been drawn."""
        now = [(device, _state(device)) for device, _ in self._random]
        with ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                if (enabled, dtype) != (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            try:
                for device, state in self._random:
                    _restore(device, state)
                yield
            finally:
                for device, state in now:
                    _restore(device, state)


def _state(device):
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _restore(device, state):
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
