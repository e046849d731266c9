"""What an interpreter of kernels is asked about attention/paper_triton.py."""

import math

from refimpl import memory
from refimpl.attention import paper_triton, reference_attention
from refimpl.attention.kernels.configs import Config
from refimpl.attention.kernels.tile import Problem
from refimpl.attention.triton_forward import forward

DENSE = "dense"


def read(which, q, k, v):
    """((O, L), bytes above q, k and v after it and at most)."""
    function = dense if which == DENSE else paper_triton.attention
    with memory.track(q, k, v) as t:
        out = function(q, k, v)
    return out, t.now.total - t.start.total, t.peak.total - t.start.total


def dense(q, k, v):
    """The mutant: right values, with the T × T matrix."""
    return reference_attention(q, k, v, causal=True, return_logsumexp=True)


def beside_the_hardened(q, k, v, M, N):
    """(ours, theirs, kept, peak) with tiles of M queries and N keys."""
    before, (paper_triton.M, paper_triton.N) = (paper_triton.M, paper_triton.N), (M, N)
    try:
        ours, kept, peak = read("", q, k, v)
    finally:
        paper_triton.M, paper_triton.N = before
    problem = Problem.of(q, k, q.shape[-1] ** -0.5, True, None, 0.0, None, None, None, 0, 0)
    out, lse2 = forward(q, k, v, problem, Config(M, N, 4, 1))
    return ours, (out, lse2 * math.log(2)), kept, peak


