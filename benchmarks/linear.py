"""The gated delta rule beside others' code for it, in one run: seconds, and bytes at the peak of a step.

On a CPU the peers are PyTorch code: transformers' `torch_chunk_gated_delta_rule` of Qwen3-Next, and the reference of
flash-linear-attention (fla), where they are installed. On a GPU the peer is fla's kernels. Outputs have to be equal.
Rows of flash attention on as many heads say what a state is in place of.
"""

import functools
import importlib
import importlib.util
import inspect
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm

from refimpl import memory
from refimpl.attention import flash_attention, tiled_attention
from refimpl.attention.linear.delta_rule import delta_rule_bytes, gated_delta_rule, state_bytes
from refimpl.common.cache_bytes import gqa_cache_bytes

from .record import row
from .runner import BAR_DELAY, KernelTimer, compare

HEADS, HEAD_DIM, CHUNK = 8, 64, 64
LENGTHS = {"cpu": 4096, "cuda": 16384}
OURS, TRANSFORMERS, FLA, FLASH = "gated_delta_rule", "transformers, in PyTorch", "fla", "flash attention, causal"


def run(device="cpu", length=None, rounds=None):
    """Make all comparisons on `device`: (settings, rows)."""
    kind = torch.device(device).type
    T, dtype = length or LENGTHS[kind], {"cpu": torch.float32, "cuda": torch.bfloat16}[kind]
    settings = {"shape": {"batch": 1, "heads": HEADS, "tokens": T, "head_dim": HEAD_DIM}, "chunk": CHUNK,
                "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
    return settings, rows(device, T, dtype, rounds or {"cpu": 3, "cuda": 15}[kind])


def rows(device, T, dtype, rounds):
    """Yield a row for each pass and peer, of seconds and of bytes; and what a state and a cache take."""
    kind = torch.device(device).type
    timer = KernelTimer(device) if kind == "cuda" else None
    generator = torch.Generator().manual_seed(0)
    q, k, v, gradient = (torch.randn(1, HEADS, T, HEAD_DIM, generator=generator) for _ in range(4))
    gates = [torch.randn(1, HEADS, T, generator=generator) for _ in range(2)]
    given = [x.to(device, dtype) for x in (q, F.normalize(k, dim=-1), v)]
    given += [(-F.softplus(gates[0])).to(device), gates[1].sigmoid().to(device)]
    gradient, calls = gradient.to(device, dtype), candidates(kind)
    wanted, close = calls[OURS](*given), {"cpu": 1e-4, "cuda": 2e-2}[kind]
    for peer in calls.keys() - {OURS, FLASH}:
        torch.testing.assert_close(calls[peer](*given).to(dtype), wanted, rtol=close, atol=close)
    for direction, step in tqdm({"forward": _forward, "forward and backward": _step}.items(), "passes",
                                delay=BAR_DELAY, leave=False):
        timing = compare({who: functools.partial(step, call, given, gradient) for who, call in calls.items()},
                         rounds=rounds, warmup=1, title=direction, timer=timer)
        yield from (timing.row(direction, OURS, peer) for peer in calls if peer != OURS)
    peaks = {who: peak(call, given, gradient) for who, call in calls.items()}
    yield row("peak", "closed form", "bytes", peaks[OURS], delta_rule_bytes(
        given[1].shape, given[2].shape, dtype, kernel="triton" if kind == "cuda" else "tiled").peak)
    yield from (row("peak", peer, "bytes", peaks[OURS], peaks[peer]) for peer in calls if peer != OURS)
    sizes = {"layers": 1, "head_dim": HEAD_DIM}
    state, token = state_bytes(heads=HEADS, **sizes), gqa_cache_bytes(kv_heads=HEADS, **sizes)
    yield row("state", "keys and values of a token, bf16", "bytes", state, token)


def candidates(kind):
    """Return {name: function(q, k, v, log_decay, beta)} that compute the same, and flash attention."""
    found = {OURS: functools.partial(gated_delta_rule, kernel="triton" if kind == "cuda" else "tiled", chunk=CHUNK)}
    if kind == "cuda":
        if importlib.util.find_spec("fla"):
            found[FLA] = _as_ours(importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule)
    else:
        if importlib.util.find_spec("transformers"):
            module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
            rule = inspect.unwrap(module.torch_chunk_gated_delta_rule)  # where fla is installed, it would call fla's
            found[TRANSFORMERS] = _as_ours(functools.partial(rule, chunk_size=CHUNK))
        if (spec := importlib.util.find_spec("fla")) and spec.submodule_search_locations:
            found[FLA] = _as_ours(_reference_of(Path(spec.submodule_search_locations[0])))
    flash = flash_attention if kind == "cuda" else tiled_attention
    found[FLASH] = lambda q, k, v, log_decay, beta: flash(q, k, v, causal=True)
    return found


def _reference_of(package):
    """Return fla's reference in PyTorch. Its file is loaded alone: the package asks for a GPU."""
    spec = importlib.util.spec_from_file_location("fla_naive", package / "ops" / "gated_delta_rule" / "naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return functools.partial(module.naive_chunk_gated_delta_rule, chunk_size=CHUNK)


def _as_ours(rule):
    def call(*tensors):  # theirs are (batch, sequence, heads, …)
        return rule(*(x.transpose(1, 2) for x in tensors))[0].transpose(1, 2)

    return call


def _forward(call, given, gradient):
    with torch.no_grad():
        return call(*given)


def _step(call, given, gradient):
    inputs = [x.detach().requires_grad_() for x in given]
    return torch.autograd.grad(call(*inputs), inputs, gradient, allow_unused=True)


def peak(call, given, gradient):
    """Return the bytes of a forward and backward above the arguments."""
    with memory.track(*given, gradient) as tracked:
        _step(call, given, gradient)
    return tracked.peak.total - tracked.start.total
