"""Each stage of attention beside PyTorch's: bytes at the peak and seconds, and on a GPU the kernels' TFLOP/s.

There are three questions. Is the peak what the closed form predicts, and does it grow with the sequence length or with
its square? What does a stage cost in time on this device? On a GPU, how close are the kernels to the chip's own rate
(`attention_speed.py`)? Before that, each kernel is tried in a separate process (`attention_trials.py`).
"""

import functools
import itertools
import math

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from refimpl import attention, memory
from refimpl.model import softmax_attention

from . import attention_candidates, attention_speed, attention_trials, attention_variants
from .record import row
from .runner import BAR_DELAY, KernelTimer, compare

HEADS, HEAD_DIM = 8, 64
LENGTHS = {"cpu": (512, 1024, 2048, 4096), "cuda": (1024, 2048, 4096)}
DENSE, FUSED = "softmax_attention", "scaled_dot_product_attention, FLASH_ATTENTION"
STAGES = ("reference_attention", "memory_efficient_attention", "tiled_attention", "flash_attention")


def run(device="cpu", lengths=None, rounds=None):
    """Make all comparisons on `device`: (settings, rows). `lengths` replaces the device's sequence lengths."""
    kind = torch.device(device).type
    lengths, dtype = lengths or LENGTHS[kind], {"cpu": torch.float32, "cuda": torch.bfloat16}[kind]
    settings = {"shape": {"batch": 1, "heads": HEADS, "head_dim": HEAD_DIM}, "dtype": str(dtype).removeprefix("torch."),
                "lengths": list(lengths), "causal": True, "threads": torch.get_num_threads(),
                "a step": "forward and backward, q, k and v require gradients"}
    if kind == "cuda":
        return settings | SPEED_SETTINGS, gpu_rows(device, lengths, dtype, rounds or 15)
    return settings, cpu_rows(device, lengths, dtype, rounds)


def cpu_rows(device, lengths, dtype, rounds):
    """Yield the rows of bytes, then those of seconds, then those of variants."""
    yield from all_byte_rows(lengths, dtype, device)
    for length in tqdm(lengths, "times", delay=BAR_DELAY, leave=False):
        yield from time_rows(length, dtype, device, rounds or max(3, 8192 // length))
    yield from attention_variants.variant_rows(device, dtype, rounds, sorted(lengths)[:2][-1])


def all_byte_rows(lengths, dtype, device, without_kernels=False):
    """Yield the peaks at each length, then their slopes."""
    rows = []
    for length in tqdm(lengths, "lengths", delay=BAR_DELAY, leave=False):
        for each in byte_rows(length, dtype, device, without_kernels):
            rows.append(each)
            yield each
    yield from slope_rows(rows, lengths)


SPEED_SETTINGS = {
    "speed": "16,384 tokens, heads · head_dim = 2,048, bf16, contiguous (batch, heads, sequence, head_dim)",
    "timing": "CUDA events around one call, 2 GiB written before it; medians of rounds in alternation",
    "FLOPs": "pairs that are masked left out; forward 4 · D, backward 10 · D for each pair: 2.5 times the forward",
    "forward": "each kernel by name",
    "floor": "bytes of q, k, v, out and the logsumexp once; in a backward dO, dQ, dK and dV, too",
}


def gpu_rows(device, lengths, dtype, rounds):
    """Yield the rows of the chip's own rates, of the kernels beside PyTorch's, and last of the bytes, which could be
    measured on any GPU."""
    shapes = attention_speed.shapes()
    faults, timer = attention_trials.trials(device, shapes), KernelTimer(device)
    yield from attention_speed.rate_rows(device, rounds=rounds, timer=timer)
    yield from attention_speed.speed_rows(device, shapes, rounds, timer, faults=faults)
    del timer  # its buffer is 2 GiB
    yield from all_byte_rows(lengths, dtype, device, without_kernels=("triton_backward", HEAD_DIM) in faults)
    if not faults:
        yield from attention_variants.variant_rows(device, dtype, rounds)


# --- candidates ------------------------------------------------------------------------------------------------------


def candidates(device, without_kernels=False):
    """Return {name: attention(q, k, v, causal=…)}: our stages that run on this device, and PyTorch's by backend."""
    gpu = torch.device(device).type == "cuda"  # bytes and seconds of Triton's interpreter say nothing about a kernel
    kernels = gpu and not without_kernels
    found = {name: getattr(attention, name) for name in STAGES if kernels or name != "flash_attention"}
    backends = attention_candidates.BACKENDS if gpu else ["FLASH_ATTENTION"]
    return found | {DENSE: softmax_attention} | {
        f"scaled_dot_product_attention, {name}": functools.partial(fused, name) for name in backends}


def fused(backend, q, k, v, *, causal):
    """Call PyTorch's attention with this backend and no other."""
    with sdpa_kernel(getattr(SDPBackend, backend)):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


class Step:
    """Makes a forward and a backward of one attention at each call, and keeps nothing."""

    def __init__(self, attention, length, dtype, device):
        torch.manual_seed(0)
        self.shape, self.attention = (1, HEADS, length, HEAD_DIM), attention
        self.q, self.k, self.v, self.gradient = (torch.randn(self.shape, device=device).to(dtype) for _ in range(4))
        self.given = [x.requires_grad_() for x in (self.q, self.k, self.v)]

    def __call__(self):
        out = self.attention(*self.given, causal=True)
        gradients = torch.autograd.grad(out, self.given, self.gradient)
        return out, gradients


# --- bytes -----------------------------------------------------------------------------------------------------------


def byte_rows(length, dtype, device, without_kernels=False):
    """Yield a row for each attention: the peak of a step above its start, as requested from the allocator, beside the
    closed form if there is one."""
    for name, function in candidates(device, without_kernels).items():
        what, form = f"peak: {name}, {length:,} tokens", getattr(attention, f"{name}_bytes", None)
        step = Step(function, length, dtype, device)
        predicted = form(step.shape, step.shape, dtype, causal=True).peak if form else None
        peak, note = None, ""
        try:
            attention_candidates.quietly(step)  # first: it allocates workspaces and compiles kernels
            with memory.measure(device) as m:
                step()
            peak = m.peak
        except RuntimeError as error:  # a backend that this device does not have
            note = attention_candidates.reason(error)
        yield row(what, "closed form", "bytes", peak, predicted, name=name, length=length, note=note)


def slope_rows(rows, lengths):
    """Return a row for each attention: d log(peak) / d log(tokens) between the two longest sequences, beside the
    closed form's."""
    short, long = sorted(lengths)[-2:]
    found = []
    for name, own in itertools.groupby(sorted(rows, key=lambda row: row["name"]), key=lambda row: row["name"]):
        peaks = {row["length"]: row for row in own}
        values = [slope(peaks[short][which], peaks[long][which], long / short) for which in ("value", "peer_value")]
        what = f"slope of the peak, {short:,} to {long:,} tokens: {name}"
        found.append(row(what, "closed form", "", *values, name=name))
    return found


def slope(first, second, factor):
    """Return log(second / first) / log(factor), or None if either is missing."""
    return math.log(second / first) / math.log(factor) if first and second else None


# --- time ------------------------------------------------------------------------------------------------------------


def time_rows(length, dtype, device, rounds):
    """Return rows of our stages: median seconds of a step, beside dense attention and PyTorch's fused one."""
    steps = {name: Step(function, length, dtype, device) for name, function in candidates(device).items()}
    timing = compare(steps, rounds=rounds, warmup=1, title=f"{length:,} tokens")
    return [row(f"step: {name}, {length:,} tokens", peer, "s", timing.median(name), timing.median(peer), name=name,
                length=length, spread=timing.spread(name), peer_spread=timing.spread(peer), rounds=rounds)
            for name in steps if name in STAGES for peer in (DENSE, FUSED)]
