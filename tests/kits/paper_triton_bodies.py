"""What an interpreter of kernels is asked about attention/paper_triton.py."""

import math
from unittest import mock

from refimpl import memory
from refimpl.attention import reference_attention
from refimpl.attention.kernels.configs import Config
from refimpl.attention.kernels.tile import Problem
from refimpl.attention.triton_forward import forward
from refimpl.papers import flash_attention_triton as paper_triton


def read(attention, q, k, v, **options):
    """((O, L), bytes above q, k and v after it and at most)."""
    with memory.track(q, k, v) as t:
        out = attention(q, k, v, **options)
    return out, t.now.total - t.start.total, t.peak.total - t.start.total


def read_dense(q, k, v):
    """Of the mutant: right values, with the T × T matrix."""
    return read(reference_attention, q, k, v, causal=True, return_logsumexp=True)


def beside_the_hardened(q, k, v, M, N):
    """(ours, theirs, kept, peak) with tiles of M queries and N keys."""
    with mock.patch.multiple(paper_triton, M=M, N=N):
        ours, kept, peak = read(paper_triton.attention, q, k, v)
    problem = Problem.of(q, k, q.shape[-1] ** -0.5, True, None, 0.0, None, None, None, 0, 0)
    out, lse2 = forward(q, k, v, problem, Config(M, N, 4, 1))
    return ours, (out, lse2 * math.log(2)), kept, peak
