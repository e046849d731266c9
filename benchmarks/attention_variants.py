"""Attention of the models of today beside the plain one in one run: peak bytes and seconds of a step, with a hook on
scores, with sinks, and with v of another width than q and k.

Bytes beside the closed form without a hook: a hook may take a few tiles, never a matrix. Seconds beside the same step
without the hook; values of another width beside what a kernel without them needs, v padded with zeros to q's width.
"""

import functools

import torch
from torch.nn import functional as F
from tqdm import tqdm

from refimpl import attention, memory
from refimpl.attention import Alibi, Documents, PrefixLM, Softcap, alibi_slopes

from .record import row
from .runner import BAR_DELAY, compare

HEADS, SIZES = 8, {"cpu": (1024, 64), "cuda": (8192, 128)}  # tokens, head_dim
MLA = 192, 128  # head_dim of q and k, and of v: DeepSeek-V2 and V3
ROUNDS = {"cpu": 3, "cuda": 15}


def variants(length, device):
    """Return {name: options of an attention}."""
    ids = torch.arange(length, device=device)[None] // (length // 4)
    return {"softcap": {"causal": True, "score": Softcap(50.0)},
            "ALiBi": {"causal": True, "score": Alibi(alibi_slopes(HEADS, device))},
            "documents": {"causal": True, "score": Documents(ids)},
            "prefix LM": {"score": PrefixLM(torch.tensor([length // 4], device=device))},
            "sinks": {"causal": True, "sinks": torch.zeros(HEADS, device=device, requires_grad=True)}}


def padded(function, q, k, v, **options):
    """Call an attention with v padded to q's width, and cut the output off."""
    return function(q, k, F.pad(v, (0, q.shape[-1] - v.shape[-1])), **options)[..., : v.shape[-1]]


class Step:
    """Makes a forward and a backward at each call, and keeps nothing."""

    def __init__(self, function, length, D, V, dtype, device, **options):
        torch.manual_seed(0)
        self.q, self.k, self.v, self.gradient = (
            torch.randn(1, HEADS, length, columns, device=device).to(dtype) for columns in (D, D, V, V))
        self.given = [x.requires_grad_() for x in (self.q, self.k, self.v)]
        self.function = functools.partial(function, **options)
        self.wanted = self.given + [options[name] for name in ("sinks",) if name in options]

    def __call__(self):
        return torch.autograd.grad(self.function(*self.given), self.wanted, self.gradient)


def variant_rows(device, dtype, rounds=None, length=None):
    """Yield for each variant a row of bytes and one of seconds."""
    kind = torch.device(device).type
    name = {"cpu": "tiled_attention", "cuda": "flash_attention"}[kind]
    function, form = getattr(attention, name), getattr(attention, f"{name}_bytes")
    (T, D), rounds = SIZES[kind], rounds or ROUNDS[kind]
    T, make = length or T, functools.partial(Step, dtype=dtype, device=device)
    calls = {which: (D, D, make(function, T, D, D, **options), make(function, T, D, D, causal="score" not in options
             or not isinstance(options["score"], PrefixLM)), "without")
             for which, options in variants(T, device).items()}
    step, other = (make(which, T, *MLA, causal=True) for which in (function, functools.partial(padded, function)))
    calls["v of 128, q and k of 192"] = (*MLA, step, other, "v padded to 192")
    for which, (D, V, step, other, peer) in tqdm(calls.items(), "variants", delay=BAR_DELAY, leave=False):
        step()  # it may compile kernels
        with memory.measure(device) as m:
            step()
        predicted = form((1, HEADS, T, D), (1, HEADS, T, D), dtype, v_dim=V).peak
        yield row(f"variant, peak: {which}, {name}, {T:,} tokens", "closed form", "bytes", m.peak, predicted,
                  variant=which, length=T)
        timing = compare({"with": step, "without": other}, rounds=rounds, warmup=1, title=which)
        yield row(f"variant, step: {which}, {name}, {T:,} tokens", peer, "s", timing.median("with"),
                  timing.median("without"), variant=which, length=T, spread=timing.spread("with"),
                  peer_spread=timing.spread("without"), rounds=rounds)
