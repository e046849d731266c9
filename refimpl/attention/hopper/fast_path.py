"""Which forward runs: the kernel that was asked for by name, or by default ("auto") the fastest that is trusted.

A kernel for Hopper depends on more of the compiler than one that loads through pointers: descriptors, bounds that
hardware checks, barriers, the order of what is in flight. All of that changes from one version of Triton to the next,
and a barrier in the wrong place does not raise: it hangs the GPU. So "auto" takes one only on two conditions:

- a GPU has run it right with this version of Triton, on record (`PROVEN`);
- on this device, at the first call of its kind, it agrees with the pointer kernel on two small calls of that kind.

If it disagrees or raises, then or later, it warns once, and the pointer kernel is used instead. (Call attention once
before you capture CUDA graphs.)
"""

import importlib
import warnings
from typing import NamedTuple

import torch
import triton

from .. import triton_forward
from ..kernels.tile import Problem

MODULES = {"hopper": "forward", "gluon": "gluon_forward"}  # each has suits(q, k, v) and forward(q, k, v, …)
# Triton's version ("3.6") → the kernel of MODULES that "auto" takes with it. tests/attention/hopper/test_fast_path.py
# holds each entry to a reading of a GPU in data/measurements/*/smoke.json.
PROVEN = {"3.6": "gluon"}


class Kind(NamedTuple):
    """Identifies calls that are trusted together: they compile to one kernel, except for the tail of a sequence."""

    kernel: str
    device: torch.device
    dtype: torch.dtype
    D: int
    causal: bool
    windowed: bool

    def __str__(self):
        return (f"{self.kernel} on {self.device} for {self.dtype}, head_dim={self.D}, causal={self.causal}, "
                f"window={self.windowed}")


_faults = {}  # Kind → what is wrong with it, None if nothing


def forward(q_BHTD, k_BGSD, v_BGSD, problem, causal, window, kernel="auto"):
    """Return (out_BHTD, lse2_BHT), as `triton_forward.forward` does. Raises ValueError for a kernel of MODULES that
    does not take this call."""
    options = {"scale": problem.scale, "causal": causal, "window": window}
    if kernel in MODULES:
        check_suits(kernel, q_BHTD, k_BGSD, v_BGSD, problem)
        return module_of(kernel).forward(q_BHTD, k_BGSD, v_BGSD, **options)
    fast = PROVEN.get(".".join(triton.__version__.split(".")[:2])) if kernel == "auto" else None
    if fast and takes(fast, q_BHTD, k_BGSD, v_BGSD, problem):
        kind = Kind(fast, q_BHTD.device, q_BHTD.dtype, q_BHTD.shape[-1], causal, window is not None)
        if trusted(kind):
            try:
                return module_of(fast).forward(q_BHTD, k_BGSD, v_BGSD, **options)
            except torch.OutOfMemoryError:
                raise  # not the kernel's fault: the other one would need as much
            except Exception as error:
                set_verdict(kind, f"raises {type(error).__name__}: {error}")
    return triton_forward.forward(q_BHTD, k_BGSD, v_BGSD, problem)


def module_of(kernel):
    """Import and return the module of a fast kernel. It is imported late, since some versions of Triton lack Gluon."""
    return importlib.import_module(f".{MODULES[kernel]}", __package__)


def takes(kernel, q_BHTD, k_BGSD, v_BGSD, problem):
    """Say whether a fast kernel can compute this call."""
    plain = all(x is None for x in (problem.packed, problem.dropout, problem.score.any, problem.sinks))
    return plain and q_BHTD.shape[-1] == v_BGSD.shape[-1] and module_of(kernel).suits(q_BHTD, k_BGSD, v_BGSD)


def check_suits(kernel, q_BHTD, k_BGSD, v_BGSD, problem):
    """Raise ValueError if a fast kernel that was asked for by name cannot compute this call."""
    if not takes(kernel, q_BHTD, k_BGSD, v_BGSD, problem):
        raise ValueError(f"kernel={kernel!r} with q of shape {tuple(q_BHTD.shape)}, strides {q_BHTD.stride()}, "
                         f"{q_BHTD.dtype} on {q_BHTD.device}, {'with' if problem.dropout else 'no'} dropout, "
                         f"{'packed' if problem.packed else 'not packed'}: expected float16 or bfloat16 on a GPU of "
                         "compute capability 9.0, base and strides of multiples of 16 bytes, no dropout, not packed, "
                         "no score hooks or sinks, v of the same head_dim, and what "
                         f"refimpl.attention.hopper.{MODULES[kernel]}.suits says; kernel='auto' takes every "
                         "call")


def trusted(kind):
    """Say whether the kernel of this kind of call agrees with the pointer kernel; checked at the first call of a
    kind."""
    if kind not in _faults:
        set_verdict(kind, disagreement(kind))
    return _faults[kind] is None


def set_verdict(kind, fault):
    """Record the verdict on a kind; warn if it is a fault."""
    _faults[kind] = fault
    if fault:
        warnings.warn(f"flash_attention's fast path is not used: with Triton {triton.__version__} {kind} {fault}; the "
                      "pointer kernel is used", RuntimeWarning, stacklevel=2)


@torch.no_grad()
def disagreement(kind):
    """Compare a fast kernel with the pointer kernel on two calls of this kind: 2 query heads on 1, with T = S and with
    T < S. Returns how they differ, None if they agree."""
    generator = torch.Generator(device=kind.device).manual_seed(0)
    scale, window, errors = kind.D**-0.5, 100 if kind.windowed else None, []
    for T, S in ((300, 300), (200, 512)):
        q, k, v = (torch.randn(1, heads, rows, kind.D, generator=generator, device=kind.device).to(kind.dtype)
                   for heads, rows in ((2, T), (1, S), (1, S)))
        problem = Problem.of(q, k, scale, kind.causal, window, 0.0, None, None, None, 0, 0)
        try:
            fast = module_of(kind.kernel).forward(q, k, v, scale=scale, causal=kind.causal, window=window)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return f"raises {type(error).__name__}: {error}"
        expected = triton_forward.forward(q, k, v, problem)
        errors += [(a.float() - b.float()).abs().max().item() for a, b in zip(fast, expected, strict=True)]
    # Values are of the order of 1, and a 16-bit rounding is below 0.01. A NaN is no agreement.
    return None if all(error <= 0.02 for error in errors) else f"is off by {errors}"
