"""What attention of a split sequence keeps and sends, in closed form: bytes on one of N ranks.

With B sequences, T tokens of a rank, H query heads and G key heads of D, e bytes of an element and w of a wide one (4,
or 8 for fp64), K = 2·BGTD elements in a rank's keys and values, and r times as many key heads for Ulysses (`repeats`):

                 sent in forward            sent in backward           kept beside q, k, v and the output
    ring         e·(N−1)·K                  e·(N−1)·K + w·N·K          w·BHT
    gathered     e·(N−1)·K                  (e + w)·(N−1)·K            0
    ulysses      e·(N−1)/N·(2BHTD + r·K)    e·(N−1)/N·(2BHTD + r·K)    e·(BHTD + (r − 1)·K) + w·BHT

A ring's traffic grows with N, and hides behind computation; that of Ulysses does not grow. Ulysses keeps its output
twice, as heads and as tokens; its logsumexp is that of an attention like FlashAttention.
"""

import torch

from ..comm.traffic import Traffic, ring_traffic
from ..common.activation_bytes import activation_terms, block_terms
from .token_order import check_order
from .ulysses import repeats

METHODS = ("ring", "gathered", "ulysses")
QUADRATIC = ("causal mask", "softmax output", "softmax dropout mask", "softmax dropout output")  # of `block_terms`


def attention_traffic(method, batch, tokens, heads, kv_heads, head_dim, world_size, dtype=torch.float32, window=None):
    """Return (forward, backward): the Traffic of one attention on each rank, which has `tokens` of the sequence.
    `window`: of a ring. ValueError for an unknown method, and for Ulysses if N does not divide the heads."""
    _check(method)
    N, e, wide = world_size, dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    K = 2 * batch * kv_heads * tokens * head_dim
    if method == "ring" and window is not None:
        sent = 2 * batch * kv_heads * head_dim * min(window, (N - 1) * tokens)
        return Traffic(send=e * sent), Traffic(send=(e + wide) * sent)
    if method == "ring":
        return Traffic(send=(N - 1) * e * K), Traffic(send=(N - 1) * e * K + (N > 1) * N * wide * K)
    if method == "gathered":
        gather, scatter = (ring_traffic(kind, N * each * K, N) for kind, each in (("all_gather", e),
                                                                                  ("reduce_scatter", wide)))
        return Traffic(all_gather=gather), Traffic(all_gather=gather, reduce_scatter=scatter)
    rows = 2 * batch * heads * tokens * head_dim + repeats(heads, kv_heads, N) * K
    once = Traffic(all_to_all=ring_traffic("all_to_all", e * rows, N))
    return once, once


def context_block_terms(config, batch, tokens, world_size, method="ring", dtype=torch.float32, device="cpu"):
    """Return {term: bytes} that a rank with `tokens` of the sequence keeps of one block of a GPT for backward: those of
    `memory.block_terms` for these tokens, without terms in T², and what attention keeps beside.

    Ulysses: with an attention that keeps q, k, v, output and logsumexp. ValueError as `attention_traffic`.
    """
    _check(method)
    terms = block_terms(config, batch, tokens, dtype, device)
    terms = {name: nbytes for name, nbytes in terms.items() if name not in QUADRATIC}
    row = torch.promote_types(dtype, torch.float32).itemsize * batch * config.heads * tokens
    if method == "ring":
        return terms | {"logsumexp": row}
    if method == "gathered":
        return terms
    times, key = repeats(config.heads, config.kv_heads, world_size), terms["values"]
    # The output is there as heads, for attention, and as tokens, for the projection.
    return terms | {"output of heads": terms["projection input"], "repeated key heads": 2 * (times - 1) * key,
                    "logsumexp": row}


def context_activation_bytes(config, batch, tokens, world_size, method="ring", dtype=torch.float32, device="cpu"):
    """Return the bytes of all activations on a rank of one forward of a GPT with targets, as `memory.activation_bytes`
    for one device. With T = S/N tokens on a rank, they fall as 1/N."""
    terms = activation_terms(config, batch, tokens, dtype, device)
    block = context_block_terms(config, batch, tokens, world_size, method, dtype, device)
    return sum(terms.values()) - terms["blocks"] + config.layers * sum(block.values())


def work(world_size, order, tokens):
    """Return [pairs of queries and keys in each of N steps] of each rank of a causal ring, with `tokens` on each.

        plain      T²/2 + r·T²: rank N−1 has 2N−1 times as many as rank 0
        zig-zag    T²/2 in each step

    where a pair on the diagonal counts half.
    """
    check_order(order)
    N, pairs = world_size, tokens * tokens
    if order == "zig-zag":
        return [[pairs / 2] * N for _ in range(N)]
    return [[pairs / 2] + [pairs if step <= r else 0 for step in range(1, N)] for r in range(N)]


def idle_share(world_size, order):
    """Return the share of a causal ring's time in which ranks wait for others, on average, if links take no time.

    A step ends when keys have been passed on by the rank that computes most in it; N − 1 of plain order's steps take
    T², and the ranks before have nothing to do: rank r computes 1/2 + r of 1/2 + N − 1. In zig-zag order all compute.

        plain      1 − (N/2) / (N − 1/2) = (N − 1) / (2N − 1)
        zig-zag    0
    """
    done = [sum(rank) for rank in work(world_size, order, 1)]
    return 1 - sum(done) / (world_size * max(done))


def _check(method):
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected one of {', '.join(map(repr, METHODS))}")
