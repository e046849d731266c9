"""Exercises of the page *Context parallelism*."""

import torch

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.context import ring_attention

from . import exercise


def _ring(tokens, heads, kv_heads, head_dim, world_size):
    """Return (bytes that a rank keeps of one causal ring attention for backward, bytes that it sends), in fp32."""
    comm, T = FakeCommunicator(0, world_size), tokens // world_size
    leaves = [torch.randn(1, each, T, head_dim, requires_grad=True) for each in (heads, kv_heads, kv_heads)]
    with memory.track(*leaves) as t:
        out = ring_attention(*(leaf * 1 for leaf in leaves), comm, causal=True)
        kept = t.now["activations"] + t.now["communication"]
        out.sum().backward()
    return kept, comm.traffic.total


@exercise("bytes", (int, int))
def first(predict):
    """Grade `predict(tokens, heads, kv_heads, head_dim, world_size)`, which returns (bytes that a rank keeps of one
    ring attention for backward, bytes that it sends in forward and backward), of one sequence in fp32."""
    for case in ((64, 4, 4, 8, 2), (64, 4, 4, 8, 4), (128, 8, 2, 16, 4), (128, 8, 1, 16, 8)):
        tokens, heads, kv_heads, head_dim, N = case
        said, read = predict(*case), _ring(*case)
        if not isinstance(said, (tuple, list)) or len(said) != 2:
            return f"expected a pair, the bytes kept and the bytes sent; you say {said!r}"
        for what, mine, right in zip(("keeps", "sends"), said, read, strict=True):
            if mine != right:
                return (f"{tokens} tokens, {heads} heads, {kv_heads} key heads of {head_dim}, {N} ranks: you say "
                        f"{mine:,.0f}, a rank {what} {right:,} bytes")
    return None


def _blocks(rows, keys, D, blocks):
    """Return outputs and logsumexps of attention over each of some blocks of keys, and of attention over all; the last
    row sees the first block alone."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, D, generator=generator, dtype=torch.float64) * 3 for n in (rows, keys, keys))
    s = q @ k.mT / D**0.5
    s[:, -1, keys // blocks:] = -torch.inf
    parts = s.chunk(blocks, -1)
    lses = torch.stack([part.logsumexp(-1) for part in parts])
    outs = torch.stack([part.softmax(-1).nan_to_num(0) @ each for part, each in zip(parts, v.chunk(blocks, 1),
                                                                                   strict=True)])
    return outs, lses, s.softmax(-1) @ v, s.logsumexp(-1)


@exercise("what is computed", (torch.Tensor, torch.Tensor))
def second(merged):
    """Grade `merged(outs, lses)`: the output and the logsumexp of attention over all blocks, from those of each; a row
    may see no key of a block, whose logsumexp there is −∞."""
    for blocks in (1, 2, 5):
        outs, lses, out, lse = _blocks(6, 20, 8, blocks)
        said = merged(outs.clone(), lses.clone())
        if not isinstance(said, (tuple, list)) or len(said) != 2:
            return f"expected a pair, the output and the logsumexp; you say {type(said).__name__}"
        for what, mine, right in zip(("output", "logsumexp"), said, (out, lse), strict=True):
            if mine.shape != right.shape:
                return f"{blocks} blocks: the {what} is {tuple(mine.shape)}, expected {tuple(right.shape)}"
            if mine.isnan().any():
                return f"{blocks} blocks: the {what} has nan, in a row that sees no key of some block"
            if not torch.allclose(mine, right, atol=1e-10):
                return f"{blocks} blocks: the {what} is not that of attention over all keys"
    return None
