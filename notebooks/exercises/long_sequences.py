"""Exercises of the page *Long sequences*."""

import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.model import GPT, GPTConfig, softmax_attention
from refimpl.sequence_length import Quadratic

from . import SCALAR, exercise

CONFIG = GPTConfig(vocab_size=1024, context_length=1024, layers=1, hidden=32, heads=4)


def keep_every_graph(model, tokens, targets, chunk_size):
    """Train on a sequence in chunks. Broken on purpose: one backward, through the mean of the chunks' losses, so the
    activations of all chunks are kept until then. Each chunk reads the keys of earlier chunks from a list."""
    losses, past = [], {block: [] for block in model.blocks}

    def carrying(block):
        def attend(q, k, v):
            past[block].append((k, v))
            k, v = (torch.cat(each, dim=2) for each in zip(*past[block], strict=True))
            return softmax_attention(q, k, v, causal=True)

        return attend

    before = [(block.attention.attention, block.attention.options) for block in model.blocks]
    try:
        for block in model.blocks:
            block.attention.attention, block.attention.options = carrying(block), {}
        for first in range(0, tokens.shape[1], chunk_size):
            part = slice(first, first + chunk_size)
            losses.append(model(tokens[:, part], targets[:, part], offset=first))
        torch.stack(losses).mean().backward()
    finally:
        for block, (attention, options) in zip(model.blocks, before, strict=True):
            block.attention.attention, block.attention.options = attention, options


@exercise("what is computed", int)
def first(solve):
    """Grade `solve(a, b, c, budget)`, which returns the largest integer s with a·s² + b·s + c ≤ budget, or 0 if there
    is none."""
    for a, b, c in ((16, 100, 1000), (0, 7, 3), (3, 0, 0), (12_000, 5_000_000, 2 * 10**9)):
        form = Quadratic(a, b, c)
        for budget in (form(1), form(1000), form(1000) - 1, c):
            expected, said = max(0, form.largest(budget)), solve(a, b, c, budget)
            if isinstance(said, bool) or said != expected:
                return (f"{form} within {budget:,} bytes: you say {said!r}; {expected:,} takes "
                        f"{form(expected):,} bytes, and {expected + 1:,} takes {form(expected + 1):,}")
    return None


@exercise("parity and bytes", torch.Tensor)
def second(attend):
    """Grade `attend(q, k, v, first)`, which returns causal attention of a chunk whose first query has position `first`.

    q is (B, H, T, D), and k and v are (B, H, S, D) with S = first + T. It may hold T × S scores, but not S × S.
    """
    torch.manual_seed(0)
    for first, T in ((0, 32), (480, 32), (37, 5)):
        q, k, v = (torch.randn(2, 4, length, 16) for length in (T, first + T, first + T))
        with memory.track() as t:
            said = attend(q, k, v, first)
        if said.shape != q.shape or not torch.allclose(said, softmax_attention(q, k, v, causal=True), atol=1e-5):
            return f"queries {first}…{first + T - 1} see other keys than they should"
        took, limit = t.peak.total - t.start.total, 4 * 4 * 2 * 4 * T * (first + T) + 4 * k.nbytes + 65536
        if took > limit:
            return f"right, but {took:,} bytes for {T} queries and {first + T} keys; {limit:,} are enough"
    return None


@exercise("parity and bytes", SCALAR)
def third(loss):
    """Grade `loss(model, tokens, targets, chunk_size)`, which returns the mean loss over the targets that are not −100.

    The loss has no graph, and the peak holds the logits of one chunk, not those of the whole sequence.
    """
    torch.manual_seed(0)
    model, (tokens, targets) = GPT(CONFIG), torch.randint(0, 1024, (2, 1, 512))
    targets[:, 100:230] = -100
    with memory.track(model, tokens, targets) as t:
        said = loss(model, tokens, targets, 64)
    with torch.no_grad():
        expected = model(tokens, targets)
    said = torch.as_tensor(said)
    if said.requires_grad:
        return "your loss has a graph, which keeps the activations of every chunk"
    if not torch.allclose(said.float(), expected, atol=1e-5):
        mean = F.cross_entropy(model(tokens)[0, -64:], targets[0, -64:]).item()
        return f"the mean loss is {expected:.5f}, yours {said.item():.5f} (of the last chunk alone: {mean:.5f})"
    took, whole = t.peak.total - t.start.total, 4 * 512 * CONFIG.vocab_size
    return None if took < whole else f"right, but it took {took:,} bytes; the logits of all tokens are {whole:,}"
