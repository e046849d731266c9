"""Operations that PyTorch composes otherwise on a GPU: while a dry run for one goes, they are composed as there.

A composite operation (dropout, attention, rms_norm) asks for the device of its tensors and calls one kernel on a GPU,
several on a CPU. It stands above autograd in PyTorch's list of places, so what takes its place does, too; what it calls
has CUDA's formulas, and shapes without memory have no device to run on. Tensors stay on "cpu" by name.
"""

import sys
import threading
import warnings
from contextlib import ExitStack, contextmanager
from types import ModuleType

import torch
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import attention

aten = torch.ops.aten
ATTENTION = "attention: "  # begins the note about a kernel


def composites(gpu, notes):
    """Return {operation: function} of what is composed otherwise. `notes` gets a sentence for each kernel taken."""

    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        output, kernel = attention.attend(gpu, q, k, v, attn_mask, dropout_p, is_causal, scale=scale, gqa=enable_gqa)
        note = f"{ATTENTION}the {kernel} kernel, as PyTorch takes it on {gpu.name}"
        if note not in notes:
            notes.append(note)
        return output

    def dropout(x, p, train):
        if train and 0 < p < 1 and x.numel():
            return aten.native_dropout(x, p, train)[0]
        return x if p == 0 or not train or not x.numel() else x.mul(x.new_zeros(()))

    def rms_norm(x, shape, weight=None, eps=None):
        if weight is None or weight.dtype == x.dtype:
            return aten._fused_rms_norm(x, shape, weight, eps)[0]
        return aten.rms_norm.default.decompose(x, shape, weight, eps)

    def fused(operation, kernel):
        def softmax(x, dim, dtype=None):
            if x.dtype is torch.float16 and dtype is torch.float32:
                return kernel(x, dim, True)
            return operation.decompose(x, dim, dtype)

        return softmax

    return {aten.softmax.int: fused(aten.softmax.int, aten._softmax),
            aten.log_softmax.int: fused(aten.log_softmax.int, aten._log_softmax),
            aten.scaled_dot_product_attention.default: attend, aten.dropout.default: dropout,
            aten.rms_norm.default: rms_norm, **KERNELS}


def _fp32_statistics(outputs, x, *args):
    """Return fp32 statistics of 16-bit tensors, as CUDA's norms keep; the rule for a CPU says 16 bits."""
    return outputs[0], *(torch.empty(y.shape, dtype=torch.float32) for y in outputs[1:])


def _rms_norm(x, shape, weight, eps):
    kept = [*x.shape[:x.ndim - len(shape)], *[1] * len(shape)]
    return torch.empty(x.shape, dtype=x.dtype), torch.empty(kept, dtype=torch.float32)


def _rms_norm_backward(d_out, x, shape, rstd, weight, wanted):
    return (torch.empty(x.shape, dtype=x.dtype) if wanted[0] else None,
            torch.empty(weight.shape, dtype=weight.dtype) if wanted[1] else None)


# Kernels that CUDA alone has.
KERNELS = {aten._fused_rms_norm.default: _rms_norm, aten._fused_rms_norm_backward.default: _rms_norm_backward}
# Rules of PyTorch's for tensors on "cpu" that say other than its kernels do on CUDA.
RULES = {aten.native_layer_norm.default: _fp32_statistics}


DEFAULTS = ("_get_foreach_kernels_supported_devices", "_get_capturable_supported_devices")  # of optimizers, by device
_under_way = threading.Lock()


@contextmanager
def as_on_cuda(operations, casts):
    """Open a context in which fake tensors go through `operations` (`composites`), torch.autocast casts as on CUDA
    (`casts(library)`), and optimizers take foreach kernels by default. Casts are those of all of the process's tensors
    on a CPU, so RuntimeError if such a context is open already, in whatever thread."""
    if not _under_way.acquire(blocking=False):
        raise RuntimeError("a dry run for a GPU is under way in this process, and its casts are the process's: run one "
                           "after the other")
    with ExitStack() as stack:
        stack.callback(_under_way.release)
        library = torch.library.Library("aten", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # PyTorch says that its own kernels are replaced
            for operation, function in operations.items():
                # What has a kernel of its device is not taken to pieces: autograd's formula is that of the whole.
                place = "CPU" if operation in KERNELS else "AutogradCPU"
                library.impl(operation, _for_fakes(operation, function, operations), place)
            casts(library)
        for name in DEFAULTS:
            supported = getattr(sys.modules["torch.optim.optimizer"], name)
            modules = [each for each in [*sys.modules.values()] if isinstance(each, ModuleType)]
            having = [each for each in modules if vars(each).get(name) is supported]
            for module in having:  # by name, in each that imported it
                stack.callback(setattr, module, name, supported)
                setattr(module, name, lambda *args, supported=supported, **named: [*supported(*args, **named), "cpu"])
        yield


def _for_fakes(operation, function, operations):
    def call(*args, **kwargs):
        for each in args:
            while isinstance(each, torch.Tensor) and is_functorch_wrapped_tensor(each):
                each = get_unwrapped(each)
            if isinstance(each, FakeTensor) and getattr(each.fake_mode, "composites", None) is operations:
                return function(*args, **kwargs)
        return operation.decompose(*args, **kwargs)

    return call
