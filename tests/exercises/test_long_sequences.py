"""Right answers pass, wrong and unanswered ones do not."""

import math

import torch
from exercises_kit import Answers, graded
from torch.nn import functional as F

from exercises import long_sequences as page
from refimpl.model import softmax_attention
from refimpl.sequence_length import ChunkedSequenceProcessor


def solve(a, b, c, budget):
    if budget < c:
        return 0
    return (math.isqrt(b * b + 4 * a * (budget - c)) - b) // (2 * a) if a else (budget - c) // b


def attend(q, k, v, first):
    position = torch.arange(first, first + q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(k.shape[2]) <= position[:, None])


def whole_attention(q, k, v, first):
    padded = F.pad(q, (0, 0, first, 0))
    return softmax_attention(padded, k, v, causal=True)[:, :, first:]


def loss(model, tokens, targets, chunk_size):
    process, total, count = ChunkedSequenceProcessor(model, chunk_size), 0.0, (targets != -100).sum()
    for (first, last), logits in zip(process.chunks(tokens.shape[1]), process.logits(tokens), strict=True):
        total = total + F.cross_entropy(logits.flatten(0, 1), targets[:, first:last].flatten(), reduction="sum")
    return total / count


def mean_of_means(model, tokens, targets, chunk_size):
    process, losses = ChunkedSequenceProcessor(model, chunk_size), []
    for (first, last), logits in zip(process.chunks(tokens.shape[1]), process.logits(tokens), strict=True):
        losses.append(F.cross_entropy(logits.flatten(0, 1), targets[:, first:last].flatten()).nan_to_num())
    return sum(losses) / len(losses)


@torch.no_grad()
def whole_loss(model, tokens, targets, chunk_size):
    return model(tokens, targets)


ANSWERS = {
    page.first: Answers(
        right=[solve],
        wrong=[
            (lambda a, b, c, budget: solve(a, b, c, budget) + 1, "you say 2; 1 takes"),
            (lambda a, b, c, budget: budget // (a + b), "within")],
    ),
    page.second: Answers(
        right=[attend],
        wrong=[
            (lambda q, k, v, first: F.scaled_dot_product_attention(q, k, v, is_causal=True), "other keys"),
            (whole_attention, "right, but")],
    ),
    page.third: Answers(
        right=[loss],
        wrong=[
            (mean_of_means, "the mean loss is"),
            (whole_loss, "right, but it took"),
            (lambda model, tokens, targets, chunk_size: model(tokens, targets), "your loss has a graph")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
