"""What PyTorch does otherwise on fake tensors, made to be as on real ones while a dry run goes."""

import copy
import importlib.util
import logging
import sys
from contextlib import ExitStack, contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import _foreach_supported_types
from torch.utils import _foreach_utils

from .program_lines import of_the_program, running

# Where libraries ask whether a tensor is fake, in order to do something else, as under a compiler.
_ASKING = (("transformers.utils.import_utils", "is_fake_tensor"),)


@contextmanager
def as_on_real_tensors(notes):
    """Open a context in which
    - compiled code runs uncompiled, which `notes` says of each line that calls some;
    - foreach kernels are taken as for real tensors (by default on CUDA in torch.optim, and everywhere to clip
    gradients);
    - modules change dtype and device as they do with real tensors, in place;
    - tensors are formatted, copied and made lists as real ones are;
    - libraries that treat fake tensors otherwise are told that there are none;
    - PyTorch does not log a traceback for each operation that it refuses.
    """
    from torch._dynamo import eval_frame  # here: it takes a second, and a dry run imports it in any case

    with ExitStack() as stack:
        for types in [_foreach_supported_types, getattr(_foreach_utils, "_foreach_supported_types", [])]:
            types.append(FakeTensor)
            stack.callback(types.remove, FakeTensor)
        replaced = [(torch.utils, "swap_tensors", _swap(torch.utils.swap_tensors)), (FakeTensor, "tolist", _tolist),
                    (FakeTensor, "__format__", _format), (FakeTensor, "__deepcopy__", _deepcopy)]
        replaced += [(eval_frame, "_callback_from_stance", _uncompiled(eval_frame._callback_from_stance, notes))]
        def replace(owner, name, replacement):
            stack.callback(_restorer(owner, name))
            setattr(owner, name, replacement)

        for each in replaced:
            replace(*each)
        for module, name in _ASKING:
            if hasattr(sys.modules.get(module), name):
                replace(sys.modules[module], name, _no)
            elif module not in sys.modules:
                later = _OnceImported(module, lambda module, name=name: replace(module, name, _no))
                sys.meta_path.insert(0, later)
                stack.callback(later.forget)
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        log = logging.getLogger("torch._subclasses.fake_tensor")
        stack.callback(setattr, log, "disabled", log.disabled)
        log.disabled = True
        yield


def _no(tensor):
    return False


class _OnceImported:
    """Calls `then(module)` as soon as the module of this name has been imported."""

    def __init__(self, name, then):
        self._name, self._then = name, then

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        self.forget()
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_tell(module):
            run(module)
            self._then(module)

        spec.loader.exec_module = run_and_tell
        return spec

    def forget(self):
        """Look at no more imports."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def _restorer(owner, name):
    """Return a function that puts back what `owner` has of its own under this name, if it has any."""
    if name in vars(owner):
        own = vars(owner)[name]
        return lambda: setattr(owner, name, own)
    return lambda: delattr(owner, name)


def _uncompiled(original, notes):
    def callback_from_stance(callback):
        """Note the line that calls compiled code. PyTorch calls this each time; no callback means never compiled."""
        if callback not in (False, None):
            note = f"{(place := of_the_program(running()))}: `{place.expression}` runs uncompiled in a dry run"
            if note not in notes:
                notes.append(note)
        return original(callback)

    return callback_from_stance


def _swap(original):
    def swap_tensors(one, two):
        """Assign `.data`, as `Module.to` does with real parameters, which stay the same objects for optimizers."""
        if not (isinstance(one, FakeTensor) and isinstance(two, FakeTensor)):
            return original(one, two)
        one.data = two
        one.fake_device, one.constant = two.fake_device, two.constant
        return None

    return swap_tensors


def _format(tensor, specification):
    """Format a tensor of one number as a number, so that `f"{loss:.3f}"` works."""
    return format(tensor.item(), specification) if tensor.ndim == 0 else object.__format__(tensor, specification)


def _deepcopy(tensor, memo):
    """Copy a tensor with the values that are known of it. (These are no fake tensor, and cannot be copied as its
    attributes are.)"""
    if tensor.constant is None or id(tensor) in memo:
        return torch.Tensor.__deepcopy__(tensor, memo)
    with torch.no_grad():
        twin = memo[id(tensor)] = tensor.clone()
    for name in vars(tensor).keys() - vars(twin).keys():
        setattr(twin, name, copy.deepcopy(vars(tensor)[name], memo))
    if tensor.grad is not None:
        twin.grad = copy.deepcopy(tensor.grad, memo)
    return twin.requires_grad_(tensor.requires_grad)


def _tolist(tensor):
    """Return a tensor's values as a list, where they are known."""
    if tensor.constant is not None:
        return tensor.constant.tolist()
    if tensor.numel() > 1 and not tensor.is_floating_point() and not tensor.is_complex():
        tensor.fake_mode.refuse_unless_declared(tensor)
    return tensor.item() if tensor.ndim == 0 else [element.tolist() for element in tensor]
