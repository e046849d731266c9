"""Exercises of the page *Masks that skip tiles*."""

import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory

from . import drawn, exercise, off, readable

HINTS = {
    "first": [
        "Make an empty list for each block of keys first: `[[] for _ in by_query]`.",
        "Where (C, seen) stands in the list of block R of queries, (R, seen) belongs into the list of block C of keys.",
        "Go through the lists by `enumerate(by_query)`: R ascends, so each new list is in order."],
    "second": [
        "For a listed block, S = Q Kᵀ / √D, with −∞ where a pair is not seen. P = e^(S − lse): no running maximum.",
        "dV grows by Pᵀ dO. With dS = P ∘ (dO Vᵀ − Δ), dK grows by dSᵀ Q / √D.",
        "Begin with zeros: a block of keys with an empty list keeps them. `torch.cat(…, 2)` joins the blocks."]}


MASKS = {  # {name: (the predicate, tokens, rows of a block)}
    "a causal window of 20": (lambda i, j: (j <= i) & (i - j <= 20), 100, 16),
    "a window, and three global tokens": (lambda i, j: ((i - j).abs() <= 9) | (i < 3) | (j < 3), 96, 32),
    "a dilated window": (lambda i, j: ((i - j).abs() <= 12) & ((i - j) % 4 == 0), 64, 16),
    "every pair": (lambda i, j: (i >= 0) & (j >= 0), 40, 16),
    "a causal window of 20 in 512 tokens": (lambda i, j: (j <= i) & (i - j <= 20), 512, 16)}
HOLES = {"queries from 40 on that see keys 32 … 63": (lambda i, j: (i >= 40) & (j >= 32) & (j < 64), 90, 16)}


def blocks_of(sees, T, N):
    """Return [[(C, None or its booleans), …], …]: the blocks of keys that some query of a block sees."""
    i = torch.arange(T)
    return [[(C, None if x.all() else x.clone()) for C, x in enumerate(rows.split(N, 1)) if x.any()]
            for rows in sees(i[:, None], i).split(N)]


def turned(by_query):
    """Return the lists by blocks of keys."""
    return [[(R, seen) for R, listed in enumerate(by_query) for own, seen in listed if own == C]
            for C in range(len(by_query))]


def wrong_lists(said, expected, of, listed):
    """Say where lists, one for each block `of` queries or keys, differ from the expected ones; None if nowhere."""
    if len(said) != len(expected):
        return f"{len(said)} lists: expected {len(expected)}, one for each block of {of}"
    for at, (mine, right) in enumerate(zip(said, expected, strict=True)):
        where = f"the list of block {at} of {of}"
        if not all(isinstance(each, (tuple, list)) and len(each) == 2 for each in mine):
            return f"{where} is to have pairs (block, seen), yours is {str(mine)[:60]}"
        numbers, wanted = [[block for block, _ in each] for each in (mine, right)]
        if numbers != wanted:
            return f"{where} has blocks of {listed} {numbers}: expected {wanted}"
        for (block, seen), (_, truth) in zip(mine, right, strict=True):
            if (seen is None) != (truth is None):
                return f"{where}: block {block} is {'full' if truth is None else 'partial'}, expected `seen` to say so"
            if truth is not None and not (isinstance(seen, torch.Tensor) and seen.dtype == torch.bool
                                          and readable(seen) and torch.equal(seen.cpu(), truth)):
                return f"{where}: `seen` of block {block} is not which of its pairs are seen, {tuple(truth.shape)}"
    return None


def dense(q, k, sees):
    """Return all scores of q and k, −∞ where a pair is not seen."""
    i = torch.arange(q.shape[2])
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~sees(i[:, None], i), -math.inf)


def measured(function, *given, products, blocks, N):
    """Return (what a function returned, a sentence if it took more than listed blocks do: FLOPs of `products` matrix
    products, and in a long sequence a quarter of the bytes of its scores)."""
    with FlopCounterMode(display=False) as counter, memory.track(*given) as t:
        found = function(*given, blocks, N)
    B, H, T, D = given[0].shape
    pairs = sum(min(N, T - R * N) * min(N, T - C * N) for R, listed in enumerate(blocks) for C, _ in listed)
    flops, (most, every) = counter.get_total_flops(), (2 * products * B * H * D * each for each in (pairs, T * T))
    took, limit = t.peak.total - t.start.total, B * H * T * T
    if flops > most:
        return found, f"{flops:,} FLOPs; the listed blocks take {most:,}, and all pairs {every:,}"
    return found, f"{took:,} bytes; {limit:,} are enough, a quarter of the scores" if took > limit and T > 500 else None


@exercise("the lists", [list])
def first(transposed):
    """Grade `transposed(by_query)`, which returns for each block of keys its list [(block of queries, seen), …]."""
    for name, (sees, T, N) in {**MASKS, **HOLES}.items():
        by_query = blocks_of(sees, T, N)
        said = transposed([list(each) for each in by_query])
        if wrong := wrong_lists(said, turned(by_query), "keys", "queries"):
            return f"{name}, {T} tokens in blocks of {N}: {wrong}"
    return None


@exercise("parity and bytes, and FLOPs", (torch.Tensor, torch.Tensor))
def second(key_gradients):
    """Grade `key_gradients(q, k, v, d_out, lse, delta, by_key, N)`, which returns (dK, dV) of the scores that are seen.

    q, k, v and d_out are (B, H, T, D), lse and delta (B, H, T, 1). It takes four products of the listed blocks alone.
    """
    masks = {**MASKS, "keys 32 … 63 alone": (lambda i, j: (i >= 0) & (j >= 32) & (j < 64), 90, 16)}
    for name, (sees, T, N) in masks.items():
        q, k, v, d_out = drawn(*[(2, 3, T, 16)] * 4, scale=4)
        given = [x.clone().requires_grad_() for x in (k, v)]
        s = dense(q, given[0], sees)
        out, lse = s.softmax(-1) @ given[1], s.logsumexp(-1, keepdim=True).detach()
        right = torch.autograd.grad(out, given, d_out)
        delta = (d_out * out.detach()).sum(-1, keepdim=True)
        said, more = measured(key_gradients, q, k, v, d_out, lse, delta, products=4,
                              blocks=turned(blocks_of(sees, T, N)), N=N)
        for each, mine, truth in zip(("dK", "dV"), said, right, strict=True):
            if wrong := off(mine, truth, "that of the pairs that are seen"):
                return f"{name}, {T} tokens in blocks of {N}: {each}{wrong}"
        if more:
            return f"{name}: right, but it takes {more}"
    return None
