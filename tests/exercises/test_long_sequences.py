"""Right answers pass, wrong and unanswered ones do not."""

import math
import re
from functools import partial

import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F

from exercises import long_sequences as page
from refimpl.model import softmax_attention
from refimpl.sequence_length import ChunkedSequenceProcessor, Quadratic

# --- first -----------------------------------------------------------------------------------------------------------


def solve(a, b, c, budget):
    if budget < c:
        return 0
    if a == 0:
        return (budget - c) // b
    return (math.isqrt(b * b + 4 * a * (budget - c)) - b) // (2 * a)


def solve_by_halves(a, b, c, budget):
    fits, fails = 0, 1
    while a * fails**2 + b * fails + c <= budget:
        fails *= 2
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if a * middle**2 + b * middle + c <= budget:
            fits = middle
        else:
            fails = middle
    return fits


def solve_with_the_library(a, b, c, budget):
    return max(0, Quadratic(a, b, c).largest(budget))


def solve_in_floats(a, b, c, budget):
    if budget < c:
        return 0
    return int((-b + math.sqrt(b * b - 4 * a * (c - budget))) / (2 * a)) if a else int((budget - c) / b)


# --- second ----------------------------------------------------------------------------------------------------------


def attend(q, k, v, first):
    position = torch.arange(first, first + q.shape[2])
    seen = torch.arange(k.shape[2]) <= position[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def attend_by_hand(q, k, v, first):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(first + 1)
    weights = scores.masked_fill_(later, -math.inf).sub_(scores.amax(-1, keepdim=True)).exp_()
    return weights @ v / weights.sum(-1, keepdim=True)


def attend_query_by_query(q, k, v, first):
    rows = [F.scaled_dot_product_attention(
        q[:, :, i : i + 1], k[:, :, : first + i + 1], v[:, :, : first + i + 1]) for i in range(q.shape[2])]
    return torch.cat(rows, dim=2)


def attend_with_the_library(q, k, v, first):
    return softmax_attention(q, k, v, causal=True)


def faulty(q, k, v, first, *, off=0, scale=None, mask=True, start=None, fill=-math.inf, dim=-1, largest=True):
    """Attention by hand, with a fault."""
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    start = first if start is None else start
    if mask:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(start + 1 + off), fill)
    weights = scores.softmax(dim) if largest else scores.exp() / scores.exp().sum(dim, keepdim=True)
    return weights @ v


def whole_attention(q, k, v, first):
    padded = F.pad(q, (0, 0, first, 0))
    return softmax_attention(padded, k, v, causal=True)[:, :, first:]


def with_a_whole_mask(q, k, v, first):
    seen = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[first:]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def from_the_left(q, k, v, first):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def own_chunk_alone(q, k, v, first):
    return softmax_attention(q, k[:, :, first:], v[:, :, first:], causal=True)


# --- third -----------------------------------------------------------------------------------------------------------


def loss(model, tokens, targets, chunk_size):
    total, first = 0.0, 0
    for logits in ChunkedSequenceProcessor(model, chunk_size).logits(tokens):
        part = targets[:, first : first + logits.shape[1]]
        total += F.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum").item()
        first += logits.shape[1]
    return total / (targets != -100).sum().item()


@torch.no_grad()
def loss_of_the_processor(model, tokens, targets, chunk_size):
    return ChunkedSequenceProcessor(model, chunk_size)(tokens, targets)


@torch.no_grad()
def loss_with_a_cache(model, tokens, targets, chunk_size):
    """Carries keys and values by hand."""
    past, before = {}, [block.attention.attention for block in model.blocks]

    def carrying(number):
        def attend(q, k, v, **options):
            old = past.get(number, (k[:, :, :0], v[:, :, :0]))
            past[number] = torch.cat((old[0], k), 2), torch.cat((old[1], v), 2)
            return softmax_attention(q, *past[number], causal=True)
        return attend

    total = torch.zeros(())
    for number, block in enumerate(model.blocks):
        block.attention.attention = carrying(number)
    for first in range(0, tokens.shape[1], chunk_size):
        part = slice(first, first + chunk_size)
        total += model(tokens[:, part], targets[:, part], offset=first, reduction="sum")
    for block, attention in zip(model.blocks, before, strict=True):
        block.attention.attention = attention
    return total / (targets != -100).sum()


@torch.no_grad()
def loss_of_a_chunked_head(model, tokens, targets, chunk_size):
    """The blocks see all tokens, without scores; the head sees one chunk."""
    model, state = type(model)(model.config, F.scaled_dot_product_attention), model.state_dict()
    model.load_state_dict(state)
    x, total = model.embed(tokens), 0.0
    for block in model.blocks:
        x = block(x)
    for part, target in zip(x.split(chunk_size, 1), targets.split(chunk_size, 1), strict=True):
        total += model.predict(part, target, reduction="sum")
    return total / (targets != -100).sum()


def sums(model, tokens, targets, chunk_size, keep=False):
    """Return [(sum of losses, how many count, how many there are)] of each chunk."""
    process, found, kept = ChunkedSequenceProcessor(model, chunk_size), [], []
    for (first, last), logits in zip(process.chunks(tokens.shape[1]), process.logits(tokens), strict=True):
        part = targets[:, first:last]
        total = F.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum")
        found.append((total, (part != -100).sum(), part.numel()))
        kept += [logits] * keep
    return found


def mean_of_means(*given):
    means = [total / count for total, count, _ in sums(*given) if count]
    return sum(means) / len(means)


def mean_of_all_means(*given):
    means = [(total / count).nan_to_num() for total, count, _ in sums(*given)]
    return sum(means) / len(means)


def mean_with_nan(*given):
    means = [total / count for total, count, _ in sums(*given)]
    return sum(means) / len(means)


def weighted_by_tokens(*given):
    found = sums(*given)
    return sum((total / count).nan_to_num() * n for total, count, n in found) / sum(n for *_, n in found)


def over_all_tokens(*given):
    found = sums(*given)
    return sum(total for total, *_ in found) / sum(n for *_, n in found)


def the_sum(*given):
    return sum(total for total, *_ in sums(*given))


def the_last(*given):
    total, count, _ = sums(*given)[-1]
    return total / count


def without_a_short_chunk(model, tokens, targets, chunk_size):
    whole = tokens.shape[1] // chunk_size * chunk_size
    return loss(model, tokens[:, :whole], targets[:, :whole], chunk_size)


def keeping_logits(model, tokens, targets, chunk_size):
    logits = torch.cat(list(ChunkedSequenceProcessor(model, chunk_size).logits(tokens)), dim=1)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def logits_in_a_list(*given):
    found = sums(*given, keep=True)
    return sum(total for total, *_ in found) / sum(count for _, count, _ in found)


@torch.no_grad()
def each_alone(model, tokens, targets, chunk_size, positions=True):
    total = 0.0
    for first in range(0, tokens.shape[1], chunk_size):
        part = slice(first, first + chunk_size)
        total += model(tokens[:, part], targets[:, part], offset=first * positions, reduction="sum")
    return total / (targets != -100).sum()


@torch.no_grad()
def whole_loss(model, tokens, targets, chunk_size):
    return model(tokens, targets)


@torch.no_grad()
def row_by_row(model, tokens, targets, chunk_size):
    total = sum(model(tokens[i : i + 1], targets[i : i + 1], reduction="sum") for i in range(len(tokens)))
    return total / (targets != -100).sum()


def first_row_alone(model, tokens, targets, chunk_size):
    return loss(model, tokens[:1], targets[:1], chunk_size)


def shifted(model, tokens, targets, chunk_size):
    return loss(model, tokens, F.pad(targets[:, 1:], (0, 1), value=-100), chunk_size)


def zeros_for_ignored(model, tokens, targets, chunk_size):
    return loss(model, tokens, targets.clamp(min=0), chunk_size)


ANSWERS = {
    page.first: Answers(
        right=[solve, solve_by_halves, solve_with_the_library],
        wrong=[
            (lambda *given: solve(*given) + 1, "you say 2; 1 takes 1,116 bytes, and 2 takes 1,264"),
            (lambda a, b, c, budget: budget // (a + b), "within 1,116 bytes: you say 9; 1 takes 1,116"),
            (solve_in_floats, "(a float has 16 digits; math.isqrt has all)"),
            (lambda a, b, c, budget: solve(a, b, c, max(c, budget)) if a else (budget - c) // b,
             "7·s + 3 within 2 bytes: you say -1; no s fits"),
            (lambda a, b, c, budget: (math.isqrt(max(0, b * b + 4 * a * (budget - c))) - b) // (2 * a) if a else
             solve(a, b, c, budget), "within 999 bytes: you say -1; no s fits"),
            (lambda a, b, c, budget: (math.isqrt(b * b + 4 * a * max(0, budget - c)) - b) // (2 * a),
             re.compile(r"exercise: 7·s \+ 3 within 10 bytes: your function raises ZeroDivisionError")),
            (lambda a, b, c, budget: max(0, (math.isqrt(b * b + 4 * a * (budget - c)) - b) // (2 * a)),
             "16·s² + 100·s + 1,000 within 500 bytes: your function raises ValueError"),
            (lambda a, b, c, budget: solve(a, b, 0, budget), "within 1,116 bytes: you say 5"),
            (lambda a, b, c, budget: solve(a, 0, c, budget) if a else solve(a, b, c, budget), "you say 2; 1 takes"),
            (lambda a, b, c, budget: solve(a, b, c, budget - 1), "you say 0; 1 takes 1,116 bytes"),
            (lambda a, b, c, budget: math.ceil(solve_in_floats(a, b, c, budget) + (budget > c)), "you say 2"),
            (lambda a, b, c, budget: max(1, solve(a, b, c, budget)), "within 1,000 bytes: you say 1; 0 takes 1,000"),
            (lambda a, b, c, budget: solve(a, b, c, budget) // 64 * 64, "you say 0; 1 takes"),
            (lambda a, b, c, budget: (solve(a, b, c, budget),), "expected a number, you return (1,)")],
        same=("< → <=",),  # a budget of c leaves nothing: s = 0
    ),
    page.second: Answers(
        right=[attend, attend_by_hand, attend_query_by_query, attend_with_the_library],
        wrong=[
            (from_the_left, "the query at position 37 of 42 gets another output"),
            (partial(faulty, off=1), "the query at position 0 of 24 gets another output"),
            (partial(faulty, off=-1), "is not finite"),
            (partial(faulty, mask=False), "over the keys 0 … 0"),
            (partial(faulty, start=0), "the query at position 37 of 42 gets another output"),
            (partial(faulty, scale=1.0), "gets another output"),
            (partial(faulty, scale=1 / 12), "gets another output"),
            (partial(faulty, scale=0.25), "gets another output"),
            (partial(faulty, fill=0.0), "the query at position 0 of 24 gets another output"),
            (partial(faulty, dim=-2), "gets another output"),
            (partial(faulty, largest=False), "your attention is not finite. Scores reach 100 and more"),
            (own_chunk_alone, "the query at position 37 of 42 gets another output"),
            (with_a_whole_mask, "16 queries and 2,048 keys, whose scores take 262,144"),
            (lambda *given: attend(*given).transpose(1, 2), "you return one of shape (2, 24, 3, 12)"),
            (lambda *given: attend(*given).bfloat16(), "you return one of shape (2, 3, 24, 12) in torch.bfloat16"),
            (lambda q, k, v, first: attend(q[:, :1], k[:, :1], v[:, :1], first), "you return one of shape (2, 1, 24,"),
            (lambda q, k, v, first: attend(q, v, k, first), "gets another output")],
        saves_nothing=(whole_attention, "right, but"),
    ),
    page.third: Answers(
        right=[loss, loss_of_the_processor, loss_with_a_cache, loss_of_a_chunked_head],
        wrong=[
            (mean_of_means, "it is the mean of the chunks' means, of those that have targets"),
            (mean_of_all_means, "it is the mean of the chunks' means"),
            (weighted_by_tokens, "the mean loss is 13."),
            (over_all_tokens, "it is divided by all tokens, those of −100 too"),
            (the_sum, "it is the sum"),
            (the_last, "it is the last chunk's alone"),
            (without_a_short_chunk, "it is without the last chunk, which is shorter"),
            (mean_with_nan, "yours nan: the mean over a chunk in which no target counts is nan"),
            (each_alone, "it is of chunks that do not read the keys of earlier ones"),
            (partial(each_alone, positions=False), "it is of chunks that all begin at position 0, without earlier"),
            (keeping_logits, "the logits of a chunk are 262,144, those of all tokens 4,096,000"),
            (logits_in_a_list, "right, but it took"),
            (row_by_row, "right, but it took"),
            (first_row_alone, "the mean loss is 13."),
            (shifted, "the mean loss is 13."),
            (zeros_for_ignored, "the mean loss is 13."),
            (lambda *given: ChunkedSequenceProcessor(given[0], given[3])(given[1], given[2]), "your loss has a graph"),
            (lambda model, tokens, targets, chunk_size: model(tokens, targets), "your loss has a graph"),
            (lambda model, tokens, targets, chunk_size: model(tokens, targets).item(), "right, but it took"),
            (lambda *given: torch.exp(torch.tensor(loss(*given))), "the mean loss is 13.")],
        saves_nothing=(whole_loss, "right, but it took"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
