"""Exercises of the page *Masks that skip tiles*."""

import torch

from blanks.masks_that_skip_tiles import HOLES, MASKS, dense, lists, measured, wrong_lists

from . import drawn, exercise, off

HINTS = {
    "first": [
        "Make an empty list for each block of keys first: `[[] for _ in by_query]`.",
        "Where (C, seen) stands in the list of block R of queries, (R, seen) belongs into the list of block C of keys.",
        "Go through the lists by `enumerate(by_query)`: R ascends, so each new list is in order."],
    "second": [
        "For a listed block, S = Q Kᵀ / √D, with −∞ where a pair is not seen. P = e^(S − lse): no running maximum.",
        "dV grows by Pᵀ dO. With dS = P ∘ (dO Vᵀ − Δ), dK grows by dSᵀ Q / √D.",
        "Begin with zeros: a block of keys with an empty list keeps them. `torch.cat(…, 2)` joins the blocks."]}


def turned(by_query):
    """Return the lists by blocks of keys."""
    return [[(R, seen) for R, listed in enumerate(by_query) for own, seen in listed if own == C]
            for C in range(len(by_query))]


@exercise("the lists", [list])
def first(transposed):
    """Grade `transposed(by_query)`, which returns for each block of keys its list [(block of queries, seen), …]."""
    for name, (sees, T, N) in {**MASKS, **HOLES}.items():
        by_query = lists(sees, T, N)
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
                              blocks=turned(lists(sees, T, N)), N=N)
        for each, mine, truth in zip(("dK", "dV"), said, right, strict=True):
            if wrong := off(mine, truth, "that of the pairs that are seen"):
                return f"{name}, {T} tokens in blocks of {N}: {each}{wrong}"
        if more:
            return f"{name}: right, but it takes {more}"
    return None
