"""Exercises of the page *A state in place of a cache*."""

import math

import torch
from torch.nn import functional as F

from refimpl.attention import delta_rule_bytes, gated_delta_rule

from . import drawn, exercise, off

HINTS = {
    "first": [
        "At the peak there are T / C + 1 states of D · V numbers, and some matrices of C × C and C × D numbers.",
        "`delta_rule_bytes((1, 1, T, D), (1, 1, T, V), chunk=C).peak` counts all of them. Ask it for each power of 2.",
        "`min(sizes, key=…)` returns the size for which the key is least."],
    "second": [
        "What a token sees of the tokens before it is multiplied by a of every token between them, its own included.",
        "If a is almost 0 at the first token of a document, almost nothing of the other document is left.",
        "`ids[:, 1:] != ids[:, :-1]` says where a document begins. ln a = −50 leaves 2 · 10⁻²² of a state."]}
EXACT = 1e-10  # of the largest number, in fp64
SHAPES = (1024, 64, 64), (256, 64, 64), (32768, 16, 128), (2**20, 128, 128), (4096, 16, 256), (512, 256, 256)  # T, D, V


def rule_inputs(B, H, T, D, V, fades=-1.0):
    """Return q, k of length 1, v, ln a and β (B, H, T), and a state, in fp64. `fades`: about the mean of ln a, or None:
    a and β are 1, and nothing fades."""
    q, k, v, a, beta, s = (x.double() for x in drawn(
        (B, H, T, D), (B, H, T, D), (B, H, T, V), (B, H, T), (B, H, T), (B, H, D, V)))
    k = F.normalize(k, dim=-1)
    if fades is None:
        return q, k, v, torch.zeros_like(a), torch.ones_like(beta), s
    return q, k, v, fades * a.sigmoid() * 2, beta.sigmoid(), s


def gates_of(log_a_BHT):
    """Return γ (B, H, T, 1) and Γ (B, H, T, T)."""
    logs = log_a_BHT.cumsum(-1).unsqueeze(-1)
    ratios = logs - logs.mT
    return logs.exp(), ratios.masked_fill(torch.ones_like(ratios, dtype=torch.bool).triu(1), -math.inf).exp()


def apart(said, right, what):
    """Say how far, and from which token on, an answer is off in fp64; return nothing if it is not."""
    if said.shape != right.shape or said.dtype != right.dtype:
        return f"{what}{off(said, right, '')}"
    wrong = (said - right).abs().nan_to_num(nan=math.inf) > EXACT * right.abs().max()
    if not wrong.any():
        return None
    largest = (said - right).abs().max().item()
    far = "has NaN" if math.isnan(largest) else f"is off by {largest:.1e} from that of the recurrent form"
    return f"{what} {far}" + f", first at token {wrong.amax((0, 1, 3)).int().argmax()}" * (what == "o")


@exercise("the bytes of six shapes", int)
def first(best_chunk):
    """Grade `best_chunk(T, D, V)`, which returns the power of two, from 1 to T, with the lowest peak."""
    for T, D, V in SHAPES:
        shape, sizes = f"{T:,} tokens, D = {D}, V = {V}", [2**n for n in range(T.bit_length())]
        said = best_chunk(T, D, V)
        if said not in sizes:
            return f"{shape}: {said} is not a power of two from 1 to {T:,}"
        took, least = (delta_rule_bytes((1, 1, T, D), (1, 1, T, V), chunk=C).peak for C in (
            int(said), min(sizes, key=lambda C: delta_rule_bytes((1, 1, T, D), (1, 1, T, V), chunk=C).peak)))
        if took > least:
            return f"{shape}: chunks of {said:.0f} take {took:,} bytes at the peak, and the best ones {least:,}"
    return None


@exercise("what each document gets alone", torch.Tensor)
def second(keep_apart):
    """Grade `keep_apart(log_decay, ids)`, which returns a log_decay under which packed documents do not see each other.

    log_decay is (B, H, T); ids (B, T) has the number of each token's document.
    """
    *given, log_decay, beta, _ = (x.float() for x in rule_inputs(2, 2, 200, 8, 6, fades=-0.2))
    for ends in ([[70, 200], [130, 200]], [[3, 9, 20, 64, 65, 199, 200], [1, 2, 128, 200]], [[200], [200]]):
        ids = torch.stack([torch.bucketize(torch.arange(200), torch.tensor(each), right=True) for each in ends])
        said, before = keep_apart(log_decay.clone(), ids.clone()), f"documents that end at {ends[0]} and {ends[1]}: "
        if said.shape != log_decay.shape or said.dtype != log_decay.dtype:
            return before + "log_decay" + off(said, log_decay, "")
        if said.isnan().any() or (said > 0).any():
            return before + "log_decay has NaN or a number above 0: a would be more than 1"
        if said.isinf().any():
            return before + "log_decay has −∞, and −∞ − (−∞) is NaN in the chunks: take a finite number"
        found = gated_delta_rule(*given, said, beta, kernel="tiled")
        for row, each in enumerate(ends):
            for begin, end in zip([0, *each], each, strict=False):
                here = [x[row : row + 1, :, begin:end] for x in (*given, log_decay, beta)]
                if wrong := off(found[row : row + 1, :, begin:end], gated_delta_rule(*here, kernel="tiled"),
                                "what it is alone"):
                    return f"{before}the output of tokens {begin} to {end - 1}{wrong}{_why(said.min().item())}"
    return None


def _why(low):
    """Say that ln a is so low that sums of it lose digits, if it is."""
    return f": a sum that has {low:,.0f} in it keeps few digits of its other numbers in fp32" if low < -200 else ""
