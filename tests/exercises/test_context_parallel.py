"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import context_parallel as page


def predict(tokens, heads, kv_heads, head_dim, world_size, *, gradients_travel=True, logsumexp=True):
    T, N = tokens // world_size, world_size
    kv = 2 * 4 * T * kv_heads * head_dim
    sent = (3 * N - 2 if gradients_travel else 2 * (N - 1)) * kv
    return 2 * 4 * T * heads * head_dim + kv + (4 * T * heads if logsumexp else 0), sent


def every_head_has_keys(tokens, heads, kv_heads, head_dim, world_size):
    return predict(tokens, heads, heads, head_dim, world_size)


def merged(outs, lses, lse=torch.logsumexp):
    weights = (lses - lses.logsumexp(0)).exp()
    return (weights[..., None] * outs).sum(0), lse(lses, 0)


def without_the_largest(outs, lses):
    weights = (lses - lses.amin(0)).exp()
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None], lses.logsumexp(0)


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, gradients_travel=False), "64 tokens, 4 heads, 4 key heads of 8, 2 ranks: you say 16,384, a rank sends 32,768"),
            (every_head_has_keys, "8 heads, 2 key heads of 16, 4 ranks: you say 66,560, a rank keeps 41,984"),
            (partial(predict, logsumexp=False), "you say 16,384, a rank keeps 16,896 bytes"),
            (lambda *case: 7, "expected a pair, the bytes kept and the bytes sent; you say 7")],
    ),
    page.second: Answers(
        right=[merged],
        wrong=[
            (lambda outs, lses: (outs.mean(0), lses.logsumexp(0)), "2 blocks: the output is not that of attention over all keys"),
            (without_the_largest, "2 blocks: the output has nan"),
            (partial(merged, lse=torch.sum), "2 blocks: the logsumexp is not that of attention over all keys"),
            (lambda outs, lses: (outs[0], lses), "1 blocks: the logsumexp is (1, 2, 6), expected (2, 6)")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
