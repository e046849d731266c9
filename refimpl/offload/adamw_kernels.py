"""AdamW on a range of elements in host memory, and the new weights beside it in the dtype of the model.

    m ← m + (1 − β₁)(g − m)            v ← β₂ v + (1 − β₂) g²
    p ← (1 − η w) p − η/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

"Decoupled Weight Decay Regularization" (Loshchilov & Hutter 2019), algorithm 2, η the learning rate and w the decay.
`TorchKernel` takes torch's fused kernel, and casts in passes of its own. `CompiledKernel` (`kernel.cpp`) does all in
one pass. Both give the same numbers to the bit where n is a multiple of 64 Ki; at the last few elements of a range
torch's kernel rounds otherwise.
"""

import ctypes
import functools
import math
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from ..common.compiling import CannotCompile, compiled
from ..common.nested_tensors import is_dry

SOURCE = Path(__file__).with_name("kernel.cpp")
CHUNK = 2**18  # elements of a 16-bit gradient that are cast, and then used: they stay in a cache in between
PIECE = 2**18  # elements that a thread takes at a time, as in kernel.cpp
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in kernel.cpp


class Hyper(NamedTuple):
    """Hyper-parameters of AdamW, and the number of the step, from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class TorchKernel:
    """Torch's own kernels; `threads`: of each kernel, by default torch's. 16-bit gradients are cast in chunks."""

    name = "torch"

    def __init__(self, threads=None):
        self.threads, self._wide = threads or torch.get_num_threads(), None

    def update(self, p, m, v, g, low, hyper):
        """Make one step of AdamW on `p` with moments `m`, `v`, all (n,) fp32, by gradients `g` of any dtype, and write
        the new weights to `low`, of any dtype, unless that is None."""
        if is_dry(p):
            if low is not None:
                low.copy_(p)
            return
        before = torch.get_num_threads()
        if before != self.threads:
            torch.set_num_threads(self.threads)
        try:
            chunk = max(1, p.numel()) if g.dtype == torch.float32 else CHUNK
            for first in range(0, p.numel(), chunk):
                part = slice(first, first + chunk)
                torch._fused_adamw_([p[part]], [self._fp32(g[part])], [m[part]], [v[part]], [],
                                    [torch.tensor(float(hyper.step))], lr=hyper.lr, beta1=hyper.beta1,
                                    beta2=hyper.beta2, eps=hyper.eps, weight_decay=hyper.weight_decay, amsgrad=False,
                                    maximize=False)
            if low is not None:
                low.copy_(p)
        finally:
            if before != self.threads:
                torch.set_num_threads(before)  # it is the whole process's setting

    def _fp32(self, gradient):
        """Return a gradient in fp32, of which there is one at a time."""
        if gradient.dtype == torch.float32:
            return gradient
        if self._wide is None:
            self._wide = torch.empty(CHUNK)
        return self._wide[: gradient.numel()].copy_(gradient)


class _StepConstants(ctypes.Structure):
    _fields_ = [(name, ctypes.c_float) for name in ("decay", "one_minus_beta1", "beta2", "one_minus_beta2",
                                                    "correction", "eps", "minus_step_size")]

    @classmethod
    def of(cls, hyper):
        """Compute in double precision what all elements share, as torch does."""
        return cls(1 - hyper.lr * hyper.weight_decay, 1 - hyper.beta1, hyper.beta2, 1 - hyper.beta2,
                   math.sqrt(1 - hyper.beta2**hyper.step), hyper.eps, -hyper.lr / (1 - hyper.beta1**hyper.step))


class CompiledKernel:
    """`kernel.cpp`, on `threads` that take piece after piece of the elements. CannotCompile without a compiler."""

    name = "c++"

    def __init__(self, threads=None):
        self.threads = threads or torch.get_num_threads()
        self._step = _library().step

    def __reduce__(self):
        """Copy and pickle what it was made from: a process loads the library itself."""
        return CompiledKernel, (self.threads,)

    def update(self, p, m, v, g, low, hyper):
        """See `TorchKernel.update`; gradients and weights are fp32, bf16 or fp16: TypeError for another dtype."""
        for tensor in (g, *([] if low is None else [low])):
            if tensor.dtype not in CODES:
                raise TypeError(f"{tensor.dtype}: expected {', '.join(map(str, CODES))}; use CPUAdam(kernel='torch')")
        if is_dry(p):
            if low is not None:
                low.copy_(p)
            return
        addresses = [None if x is None else x.data_ptr() for x in (p, m, v, g, low)]
        codes = CODES[g.dtype], -1 if low is None else CODES[low.dtype]
        work = functools.partial(self._step, *addresses[:4], codes[0], addresses[4], codes[1], p.numel(),
                                 _StepConstants.of(hyper), ctypes.byref(ctypes.c_int64(0)))
        # one thread fewer: this one works, too
        waiting = [_pool().submit(work) for _ in range(min(self.threads, -(-p.numel() // PIECE)) - 1)]
        work()
        for each in waiting:
            each.result()


@functools.cache
def _library():
    """Return the compiled kernel. CannotCompile if it cannot be had, or lacks a function or a dtype."""
    library = compiled(SOURCE, "adamw")
    pointer = ctypes.c_void_p
    try:
        step, has_half = library.step, library.has_half
    except AttributeError as error:
        raise CannotCompile(f"the compiled kernel lacks a function ({error}): set CXX to another compiler") from error
    step.argtypes = [pointer, pointer, pointer, pointer, ctypes.c_int32, pointer, ctypes.c_int32, ctypes.c_int64,
                     _StepConstants, pointer]
    step.restype = None
    if not has_half():  # found out now, and not in the first step
        raise CannotCompile("the compiler has no 16-bit floats: use g++ 12 or clang++ 15, or newer ones")
    return library


_pools = {}  # process → its threads; a forked process has none of its parent's


def _pool():
    if os.getpid() not in _pools:
        _pools.clear()
        _pools[os.getpid()] = ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), "refimpl-adamw")
    return _pools[os.getpid()]


KERNELS = {kernel.name: kernel for kernel in (CompiledKernel, TorchKernel)}


def kernel_of(name="auto", threads=None):
    """Return (kernel, why not the compiled one: "" if it is). `name`: "c++", "torch", or "auto": the compiled one
    where a compiler is. `threads`: a number, "auto" for the quickest, None for torch's own. CannotCompile for "c++"
    without a compiler; ValueError for another name or number."""
    if name not in ("auto", *KERNELS):
        raise ValueError(f"kernel={name!r}: expected auto, {', '.join(KERNELS)}")
    if threads not in (None, "auto") and (type(threads) is not int or threads < 1):
        raise ValueError(f"threads={threads!r}: expected an integer of at least 1, 'auto', or None for torch's number")
    if threads == "auto":
        return kernel_of(name, _quickest(name))
    try:
        return (TorchKernel(threads), "") if name == "torch" else (CompiledKernel(threads), "")
    except CannotCompile as error:
        if name == "c++":
            raise
        return TorchKernel(threads), str(error)


@functools.cache
def _quickest(name, elements=2**22, rounds=3):
    """Return the number of threads, a power of two or all cores, that updates so many elements the fastest."""
    cores = os.cpu_count() or 1
    counts = sorted({*(2**i for i in range(cores.bit_length()) if 2**i <= cores), cores})
    tensors, seconds = [torch.zeros(elements) for _ in range(4)], {}
    for count in counts:
        kernel, taken = kernel_of(name, count)[0], []
        for _ in range(rounds):
            begun = time.perf_counter()
            kernel.update(*tensors, None, Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0, 1))
            taken.append(time.perf_counter() - begun)
        seconds[count] = statistics.median(taken)
    return min(seconds, key=lambda count: (round(seconds[count] / min(seconds.values()), 1), count))
