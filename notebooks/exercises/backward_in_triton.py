"""Exercises of the page *Backward in Triton*."""

import math
import os

import torch
from torch import Tensor

from refimpl import memory
from refimpl.attention import reference_attention
from refimpl.attention.kernel_traffic import counted

from . import close, drawn, exercise


@torch.library.custom_op("refimpl_exercises::dense_inside", mutates_args=())
def dense_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention as a custom operator. Broken on purpose: the operator holds the whole matrix of weights."""
    return reference_attention(q, k, v)


@dense_inside.register_fake
def _(q, k, v):
    return torch.empty_like(q)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _counts():
    """Tell whether a kernel's loads can be counted here: only Triton's interpreter does."""
    return DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


@exercise("parity and bytes", torch.Tensor)
def first(dq):
    """Grade `dq(q, k, v, d_out, lse, delta)`, which returns the gradient of q, by a Triton kernel.

    Attention has no mask. q, k, v and d_out are contiguous fp32 (B, H, T, D), with T a multiple of 32 and D of 16; the
    logsumexps and Δ are (B, H, T). The kernel reads each query once and writes only dQ.
    """
    for B, H, T, D, scale in ((1, 2, 96, 16, 1), (2, 1, 128, 32, 10)):
        q, k, v, d_out = drawn(*[(B, H, T, D)] * 4, scale=scale, device=DEVICE)
        q.requires_grad_()
        out, lse = reference_attention(q, k, v, return_logsumexp=True)
        expected, = torch.autograd.grad(out, q, d_out)
        given = [x.detach() for x in (q, k, v, d_out, lse, (out * d_out).sum(-1))]
        said, took, traffic = _read(dq, given)
        if not close(said, expected):
            return f"{T} tokens of {D}: not dQ" + " (NaN)" * bool(said.isnan().any())
    if took > q.nbytes:
        return f"right, but it took {took:,} bytes: expected {q.nbytes:,}, the gradient"
    if traffic is None:
        return None
    if not traffic.loaded["q"]:
        return "right, but no Triton kernel read q"
    if traffic.loaded["q"] > q.nbytes:
        return f"right, but it reads q {traffic.loaded['q'] / q.nbytes:g} times: a program that holds queries, once"
    return None


def _read(answer, given):
    """Return (what `answer` returned, its peak in bytes above its inputs, Counted or None)."""
    if not _counts():
        with memory.track(*given) as t:
            said = answer(*given)
        return said, t.peak.total - t.start.total, None
    with counted(q=given[0]) as traffic, memory.track(*given) as t:
        said = answer(*given)
    return said, t.peak.total - t.start.total, traffic


@exercise("parity and bytes", torch.Tensor)
def second(received):
    """Grade `received(q, k, lse)`, which returns how much attention each key gets from all queries, (B, H, S).

    That is the sum over the rows of causal P, computed from the logsumexps. The bytes grow with the sequence length,
    not with its square.
    """
    taken = []
    for T in (512, 1024):
        q, k, v = drawn(*[(1, 1, T, 16)] * 3, device=DEVICE)
        lse = reference_attention(q, k, v, causal=True, return_logsumexp=True)[1]
        scores = (q @ k.mT / 4).masked_fill(torch.ones(T, T, device=DEVICE).triu(1).bool(), -math.inf)
        with memory.track(q, k, lse) as t:
            said = received(q, k, lse)
        took = t.peak.total - t.start.total
        if not close(said, scores.softmax(dim=-1).sum(dim=2)):
            return f"{T:,} keys: not the column sums of P" + " (NaN)" * bool(said.isnan().any())
        taken.append(took)
    if taken[1] > 2.5 * taken[0]:
        return (f"right, but it took {taken[0]:,} bytes for 512 keys and {taken[1]:,} for 1,024: twice the keys, "
                "twice the bytes is what tiles take")
    return None if taken[1] <= 1024**2 else (f"right, but it took {taken[1]:,} bytes for 1,024 keys: expected at "
                                             f"most {1024**2:,}, a quarter of the weights")
