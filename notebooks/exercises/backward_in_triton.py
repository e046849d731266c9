"""Exercises of the page *Backward in Triton*."""

import torch
from torch import Tensor

from refimpl.attention import reference_attention

from . import close, drawn, exercise, readable
from .flash_attention_in_triton import differs, ran

HINTS = {
    "first": [
        "A program holds a tile of queries: load q, d_out, lse and delta once, before the loop. In the loop load a "
        "tile of keys and of values.",
        "P = exp(s − L) with s = q kᵀ/√D. dP = dO vᵀ. dS = P (dP − Δ), where L and Δ are numbers of a row: "
        "`lse_M[:, None]`.",
        "dQ is the sum of dS k over all tiles of keys, times 1/√D: `dq_MD = tl.dot(ds_MN, k_ND, dq_MD, "
        "input_precision=\"ieee\")` in the loop, `tl.store(dq + here, dq_MD * scale)` after it."],
    "second": [
        "The weights of a tile of keys are exp(q kᵀ/√D − L), of all queries that see these keys. Subtract L before you "
        "take exp.",
        "With causal attention the queries before a tile do not see it: for keys first … first + 63 take the queries "
        "from `first` on.",
        "In PyTorch: for each tile of 64 keys, `p = (q[:, :, first:] @ k[:, :, first:first + 64].mT * D**-0.5 - "
        "lse[:, :, first:, None]).exp().tril()`. Its sum over dimension 2 is the tile's part of the result."]}


@torch.library.custom_op("refimpl_exercises::dense_inside", mutates_args=())
def dense_inside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention as a custom operator. Broken on purpose: the operator holds the whole matrix of weights."""
    return reference_attention(q, k, v)


@dense_inside.register_fake
def _(q, k, v):
    return torch.empty_like(q)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@exercise("parity and bytes", torch.Tensor)
def first(dq):
    """Grade `dq(q, k, v, d_out, lse, delta)`, which returns the gradient of q, by a Triton kernel.

    Attention has no mask. q, k, v and d_out are contiguous fp32 (B, H, T, D), with T a multiple of 32 and D of 16; the
    logsumexps and Δ are (B, H, T). The kernel reads each query once and writes only dQ.
    """
    wasted = None
    for B, H, T, D, scale in ((1, 2, 96, 16, 1), (2, 1, 160, 32, 40)):
        q, k, v, d_out = drawn(*[(B, H, T, D)] * 4, scale=scale, device=DEVICE)
        q.requires_grad_()
        out, lse = reference_attention(q, k, v, return_logsumexp=True)
        expected, = torch.autograd.grad(out, q, d_out)
        given = {"q": q, "k": k, "v": v, "d_out": d_out, "lse": lse, "delta": (out * d_out).sum(-1)}
        said, took, traffic = ran(dq, {name: x.detach() for name, x in given.items()})
        if wrong := differs(said, expected):
            scaled = said.shape == expected.shape and readable(said) and close(said * D**-0.5, expected)
            return f"{T} tokens of {D}: not dQ: {'the factor 1/√D is missing' if scaled else wrong}"
        wasted = wasted or _wasted(q, took, traffic)
    return wasted


def _wasted(q, took, traffic):
    """Return a sentence about bytes that the gradient of q does not need, else None."""
    if took > q.nbytes:
        return f"right, but it took {took:,} bytes: expected {q.nbytes:,}, the gradient"
    if traffic is None:
        return None
    if not traffic.loaded["q"] or not traffic.loaded["d_out"]:
        return "right, but no Triton kernel read q and d_out"
    for name in ("q", "d_out"):
        if traffic.loaded[name] > q.nbytes:
            return (f"right, but it reads {name} {traffic.loaded[name] / q.nbytes:.3g} times: a program that holds "
                    "queries, once")
    return None


@exercise("parity and bytes", torch.Tensor)
def second(received):
    """Grade `received(q, k, lse)`, which returns how much attention each key gets from all queries, (B, H, S).

    That is the sum over the rows of causal P, computed from the logsumexps. T is a multiple of 64. The bytes grow with
    the sequence length, not with its square.
    """
    taken = []
    for B, H, T, D, scale in ((2, 3, 192, 32, 1), (1, 1, 512, 16, 1), (1, 1, 1024, 16, 60)):
        q, k = drawn(*[(B, H, T, D)] * 2, scale=scale, device=DEVICE)
        lse = reference_attention(q, k, k, causal=True, return_logsumexp=True)[1]
        seen = torch.ones(T, T, device=DEVICE).tril().bool()
        weights = (q @ k.mT * D**-0.5).masked_fill(~seen, -torch.inf).softmax(dim=-1)
        said, took, _ = ran(received, {"q": q, "k": k, "lse": lse})
        if wrong := differs(said, weights.sum(dim=2)):
            if said.shape == lse.shape and close(said, (q @ k.mT * D**-0.5 - lse[..., None]).exp().sum(dim=2)):
                wrong = "queries before a key do not see it"
            return f"{B} × {H} heads, {T:,} keys of {D}: not the column sums of P: {wrong}"
        taken.append(took)
    if taken[2] > 2.5 * taken[1]:
        return (f"right, but it took {taken[1]:,} bytes for 512 keys and {taken[2]:,} for 1,024: twice the keys, "
                "twice the bytes is what tiles take")
    return None if taken[2] <= 1024**2 else (f"right, but it took {taken[2]:,} bytes for 1,024 keys: expected at "
                                             f"most {1024**2:,}, a quarter of the weights")
