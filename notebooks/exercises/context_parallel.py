"""Exercises of the page *Context parallelism*."""

import torch

from refimpl import memory
from refimpl.comm import FakeCommunicator
from refimpl.context import ring_attention

from . import close, exercise, readable

HINTS = {
    "first": [
        "A rank has tokens / N of the sequence. All that it keeps is of these tokens alone. A number has 4 bytes.",
        "The query and the output have `heads` heads, keys and values `kv_heads`. L has one number, not head_dim, for "
        "each token of each query head.",
        "Keys and values travel N − 1 times in forward and N − 1 times in backward. Their gradients are as large, and "
        "travel N times, back to their owner."],
    "second": [
        "The logsumexp of all keys is the logsumexp of the blocks' logsumexps. `torch.logsumexp` subtracts the maximum "
        "itself, so it bears large scores and −∞.",
        "The weight of a block is exp(L_b − L). Subtract before you take exp: an exp of L alone overflows.",
        "The output is the sum over dimension 0 of `weights[..., None] * outs`. The weights of a row sum to 1."]}


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
    for case in ((64, 4, 4, 8, 2), (96, 4, 4, 8, 3), (128, 8, 2, 16, 4), (128, 8, 1, 16, 8)):
        tokens, heads, kv_heads, head_dim, N = case
        kept, sent = _ring(*case)
        T = tokens // N
        kv, row = 8 * T * kv_heads * head_dim, 4 * T * heads
        reasons = {kept - row: "L is kept, too, a number for each token of each query head",
                   N * kept: "that is of the whole sequence, a rank has one part of it",
                   kept + 8 * T * (heads - kv_heads) * head_dim: "keys and values have fewer heads than queries"}
        why_sent = {(N - 1) * kv: "that is of forward alone",
                    2 * (N - 1) * kv: "in backward the gradients of keys and values travel, too",
                    3 * (N - 1) * kv: "the gradients take one more step, to the rank that has their keys",
                    3 * N * kv: "keys and values make N - 1 steps each way, the gradients alone make N"}
        for what, mine, right, why in zip(("keeps", "sends"), predict(*case), (kept, sent), (reasons, why_sent),
                                          strict=True):
            if mine != right:
                return (f"{tokens} tokens, {heads} heads, {kv_heads} key heads of {head_dim}, {N} ranks: you say "
                        f"{mine:,}, a rank {what} {right:,} bytes" + (f"; {why[mine]}" if mine in why else ""))
    return None


def _blocks(blocks, lead, hidden, shift):
    """Return outputs and logsumexps of attention over each of some blocks of keys, and of attention over all. Scores
    are about `shift`. Where keys are hidden, the first row sees the last block alone, and the last row the first."""
    generator, keys = torch.Generator().manual_seed(blocks), 4 * blocks
    q, k, v = (torch.randn(*lead, n, 8, generator=generator, dtype=torch.float64) for n in (6, keys, keys))
    s = q @ k.mT + shift
    if hidden:
        s[..., 0, :-4] = s[..., -1, 4:] = -torch.inf
    parts = s.chunk(blocks, -1)
    lses = torch.stack([part.logsumexp(-1) for part in parts])
    outs = torch.stack([part.softmax(-1).nan_to_num(0) @ each for part, each in zip(parts, v.chunk(blocks, -2),
                                                                                   strict=True)])
    return [each.float() for each in (outs, lses, s.softmax(-1) @ v, s.logsumexp(-1))]


@exercise("the output and the logsumexp", (torch.Tensor, torch.Tensor))
def second(merged):
    """Grade `merged(outs, lses)`: the output and the logsumexp of attention over all blocks, from those of each; a row
    may see no key of a block, whose logsumexp there is −∞."""
    for case, *given in (("2 blocks", 2, (2,), False, 0), ("one block", 1, (2,), False, 0),
                         ("3 blocks, some of which a row does not see", 3, (), True, 0),
                         ("5 blocks, scores about 120", 5, (2, 3), True, 120),
                         ("5 blocks, scores about -120", 5, (2, 3), True, -120)):
        outs, lses, *right = _blocks(*given)
        for what, mine, each in zip(("output", "logsumexp"), merged(outs.clone(), lses.clone()), right, strict=True):
            if mine.shape != each.shape or mine.dtype != each.dtype:
                return (f"{case}: the {what} is {tuple(mine.shape)} in {mine.dtype}, expected {tuple(each.shape)} in "
                        f"{each.dtype}")
            if not close(mine, each):
                return f"{case}: the {what} is not that of attention over all keys{_why(mine, outs, each)}"
    return None


def _why(mine, outs, right):
    if not readable(mine):
        return ": its storage was freed"
    if not mine.isfinite().all():
        return ": it has nan or ∞. Subtract a finite logsumexp of the row before you take exp"
    if close(mine, outs.mean(0)):
        return ": each block weighs as much. A block weighs exp(L_b - L)"
    return f": the farthest number is off by {(mine - right).abs().max().item():.2g}"
