"""Each stage of attention beside PyTorch's: bytes at the peak and seconds, and on a GPU the kernels' TFLOP/s.

There are four questions. Is the peak what the closed form predicts, and does it grow with the sequence length or with
its square? What does a stage cost in time on this device? What do the variants of today's models add: a hook on scores,
sinks, v of another width than q and k? A hook may take a few tiles, never a matrix. On a GPU, how close are the kernels
to the chip's own rate (`speed.py`)? Before that, each kernel is tried in a separate process (`kernels.py`).
"""

import functools
import itertools
import math

import torch
from torch.nn import functional as F
from tqdm import tqdm

from refimpl import attention, memory
from refimpl.attention import Alibi, Documents, PrefixLM, Softcap, alibi_slopes
from refimpl.model import softmax_attention

from ..record import row
from ..runner import BAR_DELAY, KernelTimer, compare
from . import kernels, speed

HEADS, HEAD_DIM = 8, 64
LENGTHS = {"cpu": (512, 1024, 2048, 4096), "cuda": (1024, 2048, 4096)}
DENSE, FUSED = "softmax_attention", "scaled_dot_product_attention, FLASH_ATTENTION"
STAGES = ("reference_attention", "memory_efficient_attention", "tiled_attention", "flash_attention")
VARIANT_SIZES, VARIANT_ROUNDS = {"cpu": (1024, 64), "cuda": (8192, 128)}, {"cpu": 3, "cuda": 15}  # tokens, head_dim
MLA = 192, 128  # head_dim of q and k, and of v: DeepSeek-V2 and V3
SPEED_SETTINGS = {
    "speed": "16,384 tokens, heads · head_dim = 2,048, bf16, contiguous (batch, heads, sequence, head_dim)",
    "timing": "CUDA events around one call, 2 GiB written before it; medians of rounds in alternation",
    "FLOPs": "pairs that are masked left out; forward 4 · D, backward 10 · D for each pair: 2.5 times the forward",
    "forward": "each kernel by name",
    "floor": "bytes of q, k, v, out and the logsumexp once; in a backward dO, dQ, dK and dV, too",
}


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
    yield from variant_rows(device, dtype, rounds, sorted(lengths)[:2][-1])


def gpu_rows(device, lengths, dtype, rounds):
    """Yield the rows of the chip's own rates, of the kernels beside PyTorch's, and last of the bytes, which could be
    measured on any GPU."""
    shapes = speed.shapes()
    faults, timer = kernels.trials(device, shapes), KernelTimer(device)
    yield from speed.rate_rows(device, rounds=rounds, timer=timer)
    yield from speed.speed_rows(device, shapes, rounds, timer, faults=faults)
    del timer  # its buffer is 2 GiB
    yield from all_byte_rows(lengths, dtype, device, without_kernels=("triton_backward", HEAD_DIM) in faults)
    if not faults:
        yield from variant_rows(device, dtype, rounds)


# --- stages ----------------------------------------------------------------------------------------------------------


def candidates(device, without_kernels=False):
    """Return {name: attention(q, k, v, causal=…)}: our stages that run on this device, and PyTorch's by backend."""
    gpu = torch.device(device).type == "cuda"  # bytes and seconds of Triton's interpreter say nothing about a kernel
    found = {name: getattr(attention, name) for name in STAGES
             if name != "flash_attention" or (gpu and not without_kernels)}
    return found | {DENSE: softmax_attention} | {
        f"scaled_dot_product_attention, {name}": functools.partial(kernels.pinned, name)
        for name in (kernels.BACKENDS if gpu else ["FLASH_ATTENTION"])}


class Step:
    """Makes a forward and a backward of one attention at each call, and keeps nothing. `widths`: of q and k, and of
    v."""

    def __init__(self, function, length, dtype, device, widths=(HEAD_DIM, HEAD_DIM), **options):
        torch.manual_seed(0)
        D, V = widths
        self.shape, self.function = (1, HEADS, length, D), functools.partial(function, **options or {"causal": True})
        *given, self.gradient = (torch.randn(1, HEADS, length, columns, device=device).to(dtype)
                                 for columns in (D, D, V, V))
        self.given = [x.requires_grad_() for x in given]
        self.wanted = self.given + [options[name] for name in ("sinks",) if name in options]

    def __call__(self):
        out = self.function(*self.given)
        gradients = torch.autograd.grad(out, self.wanted, self.gradient)
        return out, gradients


def all_byte_rows(lengths, dtype, device, without_kernels=False):
    """Yield the peaks at each length, then their slopes."""
    rows = []
    for length in tqdm(lengths, "lengths", delay=BAR_DELAY, leave=False):
        for each in byte_rows(length, dtype, device, without_kernels):
            rows.append(each)
            yield each
    yield from slope_rows(rows, lengths)


def byte_rows(length, dtype, device, without_kernels=False):
    """Yield a row for each attention: the peak of a step above its start, as requested from the allocator, beside the
    closed form if there is one."""
    for name, function in candidates(device, without_kernels).items():
        form = getattr(attention, f"{name}_bytes", None)
        step = Step(function, length, dtype, device)
        predicted = form(step.shape, step.shape, dtype, causal=True).peak if form else None
        peak, note = None, ""
        try:
            kernels.quietly(step)  # first: it allocates workspaces and compiles kernels
            with memory.measure(device) as m:
                step()
            peak = m.peak
        except RuntimeError as error:  # a backend that this device does not have
            note = kernels.reason(error)
        yield row(f"peak: {name}, {length:,} tokens", "closed form", "bytes", peak, predicted, name=name, length=length,
                  note=note)


def slope_rows(rows, lengths):
    """Return a row for each attention: d log(peak) / d log(tokens) between the two longest sequences, beside the
    closed form's."""
    def slope(first, second):
        return math.log(second / first) / math.log(long / short) if first and second else None

    short, long = sorted(lengths)[-2:]
    found = []
    for name, own in itertools.groupby(sorted(rows, key=lambda row: row["name"]), key=lambda row: row["name"]):
        peaks = {row["length"]: row for row in own}
        values = [slope(peaks[short][which], peaks[long][which]) for which in ("value", "peer_value")]
        found.append(row(f"slope of the peak, {short:,} to {long:,} tokens: {name}", "closed form", "", *values,
                         name=name))
    return found


def time_rows(length, dtype, device, rounds):
    """Return rows of our stages: seconds of a step, beside dense attention and PyTorch's fused one."""
    steps = {name: Step(function, length, dtype, device) for name, function in candidates(device).items()}
    timing = compare(steps, rounds=rounds, warmup=1, title=f"{length:,} tokens")
    return [timing.row(f"step: {name}, {length:,} tokens", name, peer, name=name, length=length, rounds=rounds)
            for name in steps if name in STAGES for peer in (DENSE, FUSED)]


# --- variants --------------------------------------------------------------------------------------------------------


def variants(length, device):
    """Return {name: options of an attention}."""
    ids = torch.arange(length, device=device)[None] // (length // 4)
    return {"softcap": {"causal": True, "score": Softcap(50.0)},
            "ALiBi": {"causal": True, "score": Alibi(alibi_slopes(HEADS, device))},
            "documents": {"causal": True, "score": Documents(ids)},
            "prefix LM": {"causal": False, "score": PrefixLM(torch.tensor([length // 4], device=device))},
            "sinks": {"causal": True, "sinks": torch.zeros(HEADS, device=device, requires_grad=True)}}


def padded(function, q, k, v, **options):
    """Call an attention with v padded to q's width, and cut the output off."""
    return function(q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])), **options)[..., : v.shape[-1]]


def variant_rows(device, dtype, rounds=None, length=None):
    """Yield for each variant a row of bytes beside the closed form without it, and one of seconds beside the same step
    without it: values of another width beside what a kernel without them needs, v padded with zeros to q's width."""
    kind = torch.device(device).type
    name = {"cpu": "tiled_attention", "cuda": "flash_attention"}[kind]
    function, form = getattr(attention, name), getattr(attention, f"{name}_bytes")
    (T, D), rounds = VARIANT_SIZES[kind], rounds or VARIANT_ROUNDS[kind]
    T = length or T
    make = functools.partial(Step, length=T, dtype=dtype, device=device)
    cases = {which: ((D, D), options, function, {"causal": options["causal"]}, "without")
             for which, options in variants(T, device).items()}
    cases["v of 128, q and k of 192"] = (MLA, {"causal": True}, functools.partial(padded, function), {"causal": True},
                                         "v padded to 192")
    for which, (widths, options, other, plain, peer) in tqdm(cases.items(), "variants", delay=BAR_DELAY, leave=False):
        step = make(function, widths=widths, **options)
        step()  # it may compile kernels
        with memory.measure(device) as m:
            step()
        predicted = form((1, HEADS, T, widths[0]), (1, HEADS, T, widths[0]), dtype, v_dim=widths[1]).peak
        more = {"variant": which, "length": T}
        yield row(f"variant, peak: {which}, {name}, {T:,} tokens", "closed form", "bytes", m.peak, predicted, **more)
        timing = compare({"with": step, "without": make(other, widths=widths, **plain)}, rounds=rounds, warmup=1,
                         title=which)
        yield timing.row(f"variant, step: {which}, {name}, {T:,} tokens", "with", "without", called=peer, **more,
                         rounds=rounds)
