"""Exercises of the page *Long sequences*."""

import torch
from torch.nn import functional as F

from refimpl import memory
from refimpl.model import GPT, GPTConfig, softmax_attention
from refimpl.sequence_length import Quadratic, carried_bytes

from . import SCALAR, close, drawn, exercise, readable
from .asking import Complaint

HINTS = {
    "first": [
        "With a = 0 the bytes are a line: divide what is left after c by b. Otherwise, s is a root of a·s² + b·s = "
        "budget − c.",
        "There is no s if budget < c. Ask that first: the root of a negative number is an error.",
        "`(math.isqrt(b * b + 4 * a * (budget - c)) - b) // (2 * a)` is exact, for numbers of any size."],
    "second": [
        "Query i of the chunk stands at position `first + i`, and sees the keys 0 … first + i.",
        "Compare `torch.arange(k.shape[2])` with the queries' positions as a column: a mask of T × S booleans.",
        "`F.scaled_dot_product_attention(q, k, v, attn_mask=mask)` takes a boolean mask, True where a key is seen."],
    "third": [
        "`ChunkedSequenceProcessor(model, chunk_size).logits(tokens)` yields the logits of one chunk after the other, "
        "without a graph.",
        "A mean of means is not the mean: chunks have different numbers of targets that count.",
        "Add up `F.cross_entropy(…, reduction=\"sum\")` over the chunks. Divide once by `(targets != -100).sum()`."]}

CONFIG = GPTConfig(vocab_size=1024, context_length=1024, layers=2, hidden=32, heads=4)


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


@exercise("the length", int)
def first(solve):
    """Grade `solve(a, b, c, budget)`, which returns the largest integer s with a·s² + b·s + c ≤ budget, or 0 if there
    is none."""
    for (a, b, c), s in (((16, 100, 1000), 1000), ((0, 7, 3), 5), ((3, 0, 0), 77), ((12_000, 5 * 10**6, 10**9), 613),
                         ((98_304, 3 * 10**9, 10**12), 20_000_003)):
        form = Quadratic(a, b, c)
        for budget in (form(1), form(s), form(s) - 1, c, c - 1, c // 2):
            expected = max(0, form.largest(budget))
            try:
                said = solve(a, b, c, budget)
            except Complaint as complaint:
                where = f"{form} within {budget:,} bytes: " * str(complaint).startswith("your function raises")
                raise Complaint(f"{where}{complaint}") from None
            if said != expected:
                digits = " (a float has 16 digits; math.isqrt has all)" * (budget > 2**53)
                fits = f"{expected:,} takes {form(expected):,} bytes" if budget >= c else "no s fits"
                return (f"{form} within {budget:,} bytes: you say {said!r}; {fits}, and {expected + 1:,} takes "
                        f"{form(expected + 1):,}{digits}")
    return None


@exercise("parity and bytes", torch.Tensor)
def second(attend):
    """Grade `attend(q, k, v, first)`, which returns causal attention of a chunk whose first query has position `first`.

    q is (B, H, T, D), and k and v are (B, H, S, D) with S = first + T. It may hold T × S scores, but nothing of S × S.
    """
    for first, T, B, H in ((0, 24, 2, 3), (37, 5, 2, 3), (11, 1, 3, 2), (2032, 16, 1, 2)):
        S = first + T
        q, k, v = drawn((B, H, T, 12), (B, H, S, 12), (B, H, S, 12), scale=60)
        expected, scores = softmax_attention(q, k, v, causal=True), 4 * B * H * T * S
        with memory.track(q, k, v) as t:
            said = attend(q, k, v, first)
        if not close(said, expected):
            return _far(said, expected, first)
        took, limit = t.peak.total - t.start.total, 6 * scores + 4 * k.nbytes + 65536
        if took > limit:
            return (f"right, but {took:,} bytes for {T} queries and {S:,} keys, whose scores take {scores:,}; "
                    f"{limit:,} are enough")
    return None


def _far(said, expected, first):
    if said.shape != expected.shape or said.dtype != expected.dtype:
        return (f"expected a tensor of shape {tuple(expected.shape)} in {expected.dtype}, you return one of shape "
                f"{tuple(said.shape)} in {said.dtype}")
    if not readable(said):
        return "the storage of your tensor was freed"
    if not said.isfinite().all():
        return "your attention is not finite. Scores reach 100 and more: subtract the row's largest before exp"
    off = (said - expected).abs().amax(dim=(0, 1, 3))
    i = int((off > 1e-4 * expected.abs().max()).nonzero()[0])
    return (f"the query at position {first + i} of {first + len(off)} gets another output, off by {off[i]:.2g}: "
            f"expected softmax(q kᵀ / √D) v over the keys 0 … {first + i}")


def _model(seed):
    """Return (a GPT whose tokens depend on each other much, tokens, targets of which some do not count)."""
    torch.manual_seed(seed)
    model, (tokens, targets) = GPT(CONFIG), torch.randint(0, 1024, (2, 2, 500))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    targets[:, 100:230] = -100
    targets[1, 300:350] = -100
    return model, tokens, targets


def _mistakes(model, tokens, logits, targets, chunk_size):
    """Return {what a loss may be taken for: it}."""
    alone = [[model(part, target, offset=number * chunk_size * positions, reduction="sum") for number, (part, target)
              in enumerate(zip(tokens.split(chunk_size, 1), targets.split(chunk_size, 1), strict=True))]
             for positions in (True, False)]
    each = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    chunks = [(loss.sum(), (part != -100).sum()) for loss, part in zip(
        each.split(chunk_size, 1), targets.split(chunk_size, 1), strict=True)]
    whole = targets.shape[1] // chunk_size * chunk_size
    return {"the mean of the chunks' means": sum(loss / count for loss, count in chunks if count) / len(chunks),
            "the mean of the chunks' means, of those that have targets": torch.stack(
                [loss / count for loss, count in chunks if count]).mean(),
            "divided by all tokens, those of −100 too": each.mean(),
            "the sum": each.sum(),
            "without the last chunk, which is shorter": each[:, :whole].sum() / (targets[:, :whole] != -100).sum(),
            "the last chunk's alone": chunks[-1][0] / chunks[-1][1],
            "of chunks that do not read the keys of earlier ones": sum(alone[0]) / (targets != -100).sum(),
            "of chunks that all begin at position 0, without earlier keys": sum(alone[1]) / (targets != -100).sum()}


@exercise("parity and bytes", SCALAR)
def third(loss):
    """Grade `loss(model, tokens, targets, chunk_size)`, which returns the mean loss over the targets that are not −100.

    The loss has no graph, and the peak holds the logits of one chunk, not those of the whole sequence.
    """
    for seed, chunk_size in ((0, 32), (1, 40)):
        model, tokens, targets = _model(seed)
        with memory.track(model, tokens, targets) as t:
            said = loss(model, tokens, targets, chunk_size)
        if isinstance(said, torch.Tensor) and said.requires_grad:
            return "your loss has a graph, which keeps the activations of every chunk"
        if isinstance(said, torch.Tensor) and not readable(said):
            return "the storage of your tensor was freed"
        with torch.no_grad():
            logits = model(tokens)
            expected, mistakes = model(tokens, targets).item(), _mistakes(model, tokens, logits, targets, chunk_size)
        if not abs(float(said) - expected) <= 1e-4 * expected:
            seen = next((f": it is {name}" for name, value in mistakes.items() if abs(float(said) - value) < 1e-3), "")
            seen = ": the mean over a chunk in which no target counts is nan" if float(said) != float(said) else seen
            return f"the mean loss is {expected:.5g}, yours {float(said):.5g}{seen}"
        took, one = t.peak.total - t.start.total, 4 * 2 * chunk_size * CONFIG.vocab_size
        if took > 6 * one + 2 * carried_bytes(CONFIG, 2, 500):
            return (f"right, but it took {took:,} bytes; the logits of a chunk are {one:,}, those of all tokens "
                    f"{logits.nbytes:,}")
    return None
