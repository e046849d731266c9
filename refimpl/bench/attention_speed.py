"""Attention's kernels beside PyTorch's, each backend pinned, on one device in one run: TFLOP/s, and the chip's own.

TFLOP/s are of the products that no method can leave out (`attention_flops`): 2 forward, 5 in a backward that makes the
weights again, 2.5 times the forward, as the field counts. Kernels that do 7 in a backward get no credit for two of
them. A row says how many times as fast ours is as a peer, and beside it what was aimed at: met or short.
"""

import importlib
import importlib.util
import warnings
from typing import NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from .. import catalog
from ..attention import attention_flops, flash_attention, triton_forward
from ..attention.triton_tile import Problem
from .record import row
from .runner import BAR_DELAY, compare

BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
MODULES = ("hopper", "gluon_forward")  # forwards: suits(q, k, v) and forward(q, k, v, scale=…, causal=…, window=…)
PUBLISHED = {"H100 80GB HBM3": "h100-sxm", "H100 PCIe": "h100-pcie", "H200": "h200"}  # by a part of the driver's name
OURS = ("triton_forward", *MODULES, "triton_backward")

# How many times as fast as a backend: what is to be reached, (pass, backend) → (head_dim, causal) → factor.
TARGETS = {
    ("forward", "FLASH_ATTENTION"): {(128, False): 1.25, (128, True): 1.1, (64, False): 1.2, (64, True): 1.2},
    ("backward", "FLASH_ATTENTION"): {(128, False): 1.1, (128, True): 1.1, (64, False): 1.1, (64, True): 1.1},
}
AIMS = {
    ("forward", "CUDNN_ATTENTION"): {(128, False): 0.85, (128, True): 0.85, (64, False): 1.0, (64, True): 1.0},
    ("backward", "CUDNN_ATTENTION"): {(128, False): 0.8, (128, True): 0.8, (64, False): 0.8, (64, True): 0.8},
}


class Shape(NamedTuple):
    """q, k and v are (tokens / length, width / head_dim, length, head_dim), contiguous."""

    tokens: int
    width: int
    head_dim: int
    length: int
    causal: bool

    @property
    def dims(self):
        """(B, H, N, D)."""
        return self.tokens // self.length, self.width // self.head_dim, self.length, self.head_dim

    def work(self, direction):
        """(FLOPs, bytes): of the products, and of tensors read or written once: q, k, v, out and the logsumexp, and in
        a backward dO, dQ, dK and dV too. Bytes of a 16-bit dtype."""
        B, H, N, D = self.dims
        flops = attention_flops(self.dims, self.dims, causal=self.causal)
        one, rows = 2 * B * H * N * D, 4 * B * H * N
        if direction == "forward":
            return flops.forward, 4 * one + rows
        return flops.backward_recomputing, 8 * one + rows

    def __str__(self):
        return f"d{self.head_dim}, {self.length:,} tokens, {'causal' if self.causal else 'full'}"


def shapes(tokens=16384, width=2048, head_dims=(64, 128), lengths=(2048, 4096, 8192, 16384)):
    """All that are compared."""
    return [Shape(tokens, width, D, N, causal) for D in head_dims for causal in (False, True) for N in lengths]


def speed_rows(device, chosen, rounds, timer=None, dtype=torch.bfloat16):
    """Rows of each Shape, forward and backward, each of ours beside each backend."""
    rows = []
    for shape in tqdm(chosen, "shapes", delay=BAR_DELAY, leave=False):
        torch.manual_seed(0)
        q, k, v, gradient = (torch.randn(shape.dims, device=device).to(dtype) for _ in range(4))
        found = forward_candidates(q, k, v, shape)
        rows += rows_beside("forward", shape, *ready(found, agrees_with(found["triton_forward"])), rounds, timer)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        rows += rows_beside("backward", shape, *ready(backward_candidates(q, k, v, gradient, shape)), rounds, timer)
    return rows


# --- candidates ------------------------------------------------------------------------------------------------------


def forward_candidates(q, k, v, shape):
    """{name: a call, or the reason why there is none}: ours by module, PyTorch's by backend."""
    scale, causal = shape.head_dim**-0.5, shape.causal
    problem = Problem.of(q, k, scale, causal, None, 0.0, None, None, None, 0, 0)
    found = {"triton_forward": lambda: triton_forward.forward(q, k, v, problem)}
    for name in MODULES:
        module = module_of(name)
        if isinstance(module, str) or not module.suits(q, k, v):
            found[name] = module if isinstance(module, str) else "does not suit this device or these tensors"
        else:
            found[name] = lambda module=module: module.forward(q, k, v, scale=scale, causal=causal, window=None)
    return found | {name: lambda name=name: pinned(name, q, k, v, causal) for name in BACKENDS}


def module_of(name):
    """A module of refimpl.attention, or the reason why it is not there: an import may ask of Triton what this version
    has not."""
    path = f"refimpl.attention.{name}"
    if importlib.util.find_spec(path) is None:
        return "is not there"
    try:
        return importlib.import_module(path)
    except Exception as error:  # the row says it
        return reason(error)


def pinned(backend, q, k, v, causal):
    """PyTorch's attention by this backend and no other; RuntimeError if it cannot."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def backward_candidates(q, k, v, gradient, shape):
    """The same for backward: the forward is done here, once."""
    found = {}
    forwards = {"triton_backward": lambda: flash_attention(q, k, v, causal=shape.causal)} | {
        name: lambda name=name: pinned(name, q, k, v, shape.causal) for name in BACKENDS}
    for name, forward in forwards.items():
        try:
            out = quietly(forward)
        except Exception as error:  # as in `ready`
            found[name] = reason(error)
            continue
        own = torch.empty_like(out).copy_(gradient)  # laid out as `out` is, which spares each a copy
        found[name] = lambda out=out, own=own: torch.autograd.grad(out, (q, k, v), own, retain_graph=True)
    return found


def ready(found, check=lambda name, result: None):
    """({name: call} of those that run and pass `check`, {name: reason} of the others): each is called once, which also
    compiles it. Whatever one of them raises is in its row: the others are to be read all the same."""
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
    """A check for `ready`: ours by another kernel must give what `call` gives, to a few roundings."""
    expected = []

    def check(name, result):
        if name not in MODULES:
            return None
        expected[:] = expected or quietly(call)
        within = {"output": 4 * torch.finfo(expected[0].dtype).eps, "logsumexp": 1e-4}
        for which, a, b in zip(within, result, expected, strict=True):
            error, most = (a.float() - b.float()).abs().max().item(), b.float().abs().max().item()
            if not error <= within[which] * most:  # a NaN is no agreement
                return f"wrong: its {which} is off by {error:.3g} from triton_forward's, the largest is {most:.3g}"
        return None

    return check


def quietly(call):
    """Its result; PyTorch warns at length why a backend cannot."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def reason(error):
    """An error in a line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


# --- rows ------------------------------------------------------------------------------------------------------------


def rows_beside(direction, shape, calls, reasons, rounds, timer):
    """A row for each of ours beside each backend; None for the value of one that does not run, with the reason."""
    timing = compare(calls, rounds=rounds, title=f"{direction}, {shape}", timer=timer) if calls else None
    flops, nbytes = shape.work(direction)
    rows = []
    for name in [name for name in (*calls, *reasons) if name in OURS]:
        for peer in BACKENDS:
            values = [flops / timing.median(who) / 1e12 if who in calls else None for who in (name, peer)]
            aim = verdict(direction, peer, shape, values[0] / values[1] if None not in values else None)
            seconds, spread = ([getattr(timing, what)(who) if who in calls else None for who in (name, peer)]
                               for what in ("median", "spread"))
            note = [f"{who}: {reasons[who]}" for who in (name, peer) if who in reasons]
            rows.append(row(f"{direction}, {shape}: {name}", peer, "TFLOP/s", *values, **shape._asdict(),
                            direction=direction, name=name, seconds=seconds[0], peer_seconds=seconds[1],
                            spread=spread[0], peer_spread=spread[1], flops=flops, floor_bytes=nbytes,
                            intensity=flops / nbytes, **aim, note="; ".join([*note, *aim_words(aim)])))
    return rows


def verdict(direction, peer, shape, ratio):
    """What was aimed at here, how binding it is, and whether it was reached; empty where nothing was."""
    for kind, table in (("target", TARGETS), ("aim", AIMS)):
        factor = table.get((direction, peer), {}).get((shape.head_dim, shape.causal))
        if factor:
            reached = "not measured" if ratio is None else "met" if ratio >= factor else "short"
            return {"kind": kind, "factor": factor, "verdict": reached}
    return {}


def aim_words(aim):
    return [f"{aim['kind']} {aim['factor']}: {aim['verdict']}"] if aim else []


def rate_rows(device, rounds=15, timer=None, dtype=torch.bfloat16, size=8192, buffer_bytes=2**30):
    """What the chip reaches in this run: a large matrix product in TFLOP/s, and a large copy in TB/s, beside its
    maker's figures where the catalog has them."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(buffer_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timing = compare({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, rounds=rounds, title="rates",
                     timer=timer)
    peer, published = published_rates(device)
    return [row(f"matrix rate: a product of {size:,} × {size:,} matrices", peer, "TFLOP/s",
                2 * size**3 / timing.median("product") / 1e12, published[0], name="matrix rate",
                seconds=timing.median("product"), spread=timing.spread("product")),
            row(f"memory rate: a copy of {buffer_bytes:,} bytes, read and written", peer, "TB/s",
                2 * buffer_bytes / timing.median("copy") / 1e12, published[1], name="memory rate",
                seconds=timing.median("copy"), spread=timing.spread("copy"))]


def published_rates(device):
    """(whose, (TFLOP/s, TB/s)) by the maker, or None for both."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""
    entry = next((entry for words, entry in PUBLISHED.items() if words in name), None)
    if entry is None:
        return "published", (None, None)
    hardware = catalog.hardware(entry)
    return f"published, {entry}", (hardware.bf16_flops / 1e12, hardware.memory_bandwidth / 1e12)
