"""Our attention kernels and PyTorch's, prepared to be timed beside each other.

Each is checked first: does it run on this device, and is its result right? A kernel that fails is listed with the
reason, and the others are not affected. Ours are tried before that, each in a process of its own (`trials`), since one
that hangs or reads out of bounds would end all other measurements. What a trial compiles is in Triton's cache then.
"""

import functools
import importlib
import json
import sys
import warnings
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from refimpl.attention import attention_flops, flash_attention, triton_forward
from refimpl.attention.kernels.tile import Problem

from ..trials import fault_of, in_order

BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
# FlashAttention's backward adds to dQ from many programs in any order unless PyTorch is set to be deterministic. Our
# backward is always deterministic.
DETERMINISTIC = "FLASH_ATTENTION, deterministic"
PEERS = {"forward": BACKENDS, "backward": (DETERMINISTIC, *BACKENDS)}
# Forwards written for one chip: name → (module, options). A module has the functions suits(q, k, v) and
# forward(q, k, v, scale=…, causal=…, window=…, …).
FORWARDS = {"hopper": ("triton_hopper", {}), "gluon_forward": ("gluon_forward", {}),
            "hopper, specialized": ("triton_hopper", {"specialize": True})}
# In the order in which they are tried: first the presumably fastest, last those whose barriers could hang a GPU.
OURS = ("hopper", "triton_forward", "triton_backward", "gluon_forward", "hopper, specialized")


class Shape(NamedTuple):
    """A shape to compare: q, k and v are (tokens / length, width / head_dim, length, head_dim), contiguous."""

    tokens: int
    width: int
    head_dim: int
    length: int
    causal: bool

    @property
    def dims(self):
        """Return (B, H, N, D)."""
        return self.tokens // self.length, self.width // self.head_dim, self.length, self.head_dim

    def work(self, direction):
        """Return (FLOPs, bytes) of a pass: the matrix products, and each tensor read or written once in a 16-bit dtype.

        The tensors are q, k, v, out and the logsumexp (fp32), and in a backward also dO, dQ, dK and dV.
        """
        B, H, N, D = self.dims
        flops = attention_flops(self.dims, self.dims, causal=self.causal)
        one, rows = 2 * B * H * N * D, 4 * B * H * N
        if direction == "forward":
            return flops.forward, 4 * one + rows
        return flops.backward_recomputing, 8 * one + rows

    def __str__(self):
        return f"d{self.head_dim}, {self.length:,} tokens, {'causal' if self.causal else 'full'}"


def tensors(shape, device, dtype):
    """Make q, k, v and a gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(shape.dims, device=device).to(dtype) for _ in range(4)]


# --- candidates ------------------------------------------------------------------------------------------------------


def forward_candidates(q, k, v, shape, anywhere=False):
    """Return {name: a call, or the reason why there is none}: our forwards by module, PyTorch's by backend.

    `anywhere`: include modules written for another device, some of which Triton's interpreter runs.
    """
    scale, causal = shape.head_dim**-0.5, shape.causal
    problem = Problem.of(q, k, scale, causal, None, 0.0, None, None, None, 0, 0)
    found = {"triton_forward": lambda: triton_forward.forward(q, k, v, problem)}
    for name, (module, options) in FORWARDS.items():
        try:
            module = importlib.import_module(f"refimpl.attention.{module}")
        except Exception as error:  # it may need a newer Triton; the row gives the reason
            found[name] = reason(error)
            continue
        found[name] = "does not suit this device or these tensors"
        if anywhere or module.suits(q, k, v):
            found[name] = functools.partial(module.forward, q, k, v, scale=scale, causal=causal, window=None, **options)
    return found | {name: lambda name=name: pinned(name, q, k, v, causal) for name in BACKENDS}


def pinned(backend, q, k, v, causal):
    """Call PyTorch's attention with this backend and no other. Raises RuntimeError if it cannot compute this."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def backward_candidates(q, k, v, gradient, shape, peers=PEERS["backward"], faults=()):
    """Return {name: a call of the backward, or the reason why there is none}. The forward runs here, once.

    `faults`: {name: reason} of those that must not be called.
    """
    found = {}
    forwards = {"triton_backward": lambda: flash_attention(q, k, v, causal=shape.causal, kernel="triton")} | {
        name: lambda name=name: pinned(name.partition(",")[0], q, k, v, shape.causal) for name in peers}
    for name, forward in forwards.items():
        if name in faults:
            found[name] = faults[name]
            continue
        try:
            out = quietly(forward)
        except Exception as error:  # as in `ready`
            found[name] = reason(error)
            continue
        own = torch.empty_like(out).copy_(gradient)  # laid out as `out`, so that no backward copies it
        found[name] = functools.partial(differentiate, out, (q, k, v), own, name == DETERMINISTIC)
    return found


def differentiate(out, inputs, gradient, deterministic):
    """Return dq, dk and dv. `deterministic`: use deterministic algorithms only, or raise RuntimeError."""
    modes = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), modes.fill_uninitialized_memory
    try:
        if deterministic:
            torch.use_deterministic_algorithms(True)
            modes.fill_uninitialized_memory = False  # else PyTorch would fill every empty tensor
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)
    finally:
        torch.use_deterministic_algorithms(before[0])
        modes.fill_uninitialized_memory = before[1]


# --- checks ----------------------------------------------------------------------------------------------------------


def ready(found, check=lambda name, result: None):
    """Return ({name: call} of those that run and pass `check`, {name: reason} of the others).

    Each is called once, which also compiles it. An exception becomes its reason, so that the others are still measured.
    """
    calls, reasons = {}, {}
    for name, call in found.items():
        if isinstance(call, str):
            reasons[name] = call
            continue
        try:
            fault = check(name, quietly(call))
        except Exception as error:
            fault = reason(error)
        if fault:
            reasons[name] = fault
        else:
            calls[name] = call
    return calls, reasons


def agrees_with(call):
    """Return a check for `ready`: each of FORWARDS must return what `call` returns, within rounding errors.

    `call` may be a string, the reason why there is nothing to compare with.
    """
    expected = []

    def check(name, result):
        if name not in FORWARDS:
            return None
        if isinstance(call, str):
            return f"not checked, triton_forward {call}"
        expected[:] = expected or quietly(call)
        within = {"output": 4 * torch.finfo(expected[0].dtype).eps, "logsumexp": 1e-4}
        for which, a, b in zip(within, result, expected, strict=True):
            error, most = (a.float() - b.float()).abs().max().item(), b.float().abs().max().item()
            if not error <= within[which] * most:  # a NaN must not pass
                return f"wrong: its {which} is off by {error:.3g} from triton_forward's, the largest is {most:.3g}"
        return None

    return check


def quietly(call):
    """Return `call()`, without the warnings that PyTorch gives if a backend cannot compute it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def reason(error):
    """Return the error's type and first line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# --- trials ----------------------------------------------------------------------------------------------------------

SECONDS = 60  # for all of them
DONE = "done, nothing wrong"


def trials(device, chosen):
    """Try our kernels and return {(name, head_dim): reason} of those that must not be timed.

    The kernels are tried in the order of OURS, at the largest head_dim first.
    """
    if torch.device(device).type != "cuda":
        return {}
    commands = {(name, D): command(name, [shape for shape in chosen if shape.head_dim == D])
                for D in sorted({shape.head_dim for shape in chosen}, reverse=True) for name in OURS}
    outcomes = {which: fault_of(status, said, DONE) for which, status, said, _ in in_order(commands, SECONDS)}
    return {which: fault for which, fault in outcomes.items() if fault}


def command(name, chosen):
    """Return the command line that tries one kernel at the shortest and the longest shapes."""
    lengths = [shape.length for shape in chosen]
    ends = [shape for shape in chosen if shape.length in (min(lengths), max(lengths))]
    return [sys.executable, "-m", __package__, name, json.dumps(ends)]


def trial(name, chosen, device="cuda", dtype=torch.bfloat16):
    """Return the first fault of one of our kernels, or DONE."""
    for shape in chosen:
        q, k, v, gradient = tensors(shape, device, dtype)
        if name == "triton_backward":
            given = backward_candidates(*(x.requires_grad_() for x in (q, k, v)), gradient, shape, peers=())
            _, reasons = ready(given)
        else:
            found = forward_candidates(q, k, v, shape)
            _, reasons = ready({name: found[name]}, agrees_with(found["triton_forward"]))
        if reasons:
            return reasons[name]
    return DONE
