"""Right answers pass, wrong and unanswered ones do not."""

import pytest

from refimpl.exercises import context_parallel as page


def predict(tokens, heads, kv_heads, head_dim, world_size):
    T, N = tokens // world_size, world_size
    kv = 2 * 4 * T * kv_heads * head_dim
    return 2 * 4 * T * heads * head_dim + kv + 4 * T * heads, (3 * N - 2) * kv


def gradients_stay(*case):
    return predict(*case)[0], predict(*case)[1] * 2 * (case[-1] - 1) // (3 * case[-1] - 2)


def every_head_has_keys(tokens, heads, kv_heads, head_dim, world_size):
    return predict(tokens, heads, heads, head_dim, world_size)


def no_logsumexp(*case):
    return predict(*case)[0] - 4 * case[0] // case[-1] * case[1], predict(*case)[1]


def merged(outs, lses):
    lse = lses.logsumexp(0)
    return ((lses - lse).exp()[..., None] * outs).sum(0), lse


def mean_of_softmaxes(outs, lses):
    return outs.mean(0), lses.logsumexp(0)


def without_the_largest(outs, lses):
    weights = (lses - lses.amin(0)).exp()
    return (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None], lses.logsumexp(0)


def sum_of_logs(outs, lses):
    return merged(outs, lses)[0], lses.sum(0)


@pytest.mark.parametrize(("exercise", "answer"), [
    (page.first, predict), (page.second, merged)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, gradients_stay, "64 tokens, 4 heads, 4 key heads of 8, 2 ranks: you say 16,384, a rank sends 32,768"),
    (page.first, every_head_has_keys, "8 heads, 2 key heads of 16, 4 ranks: you say 66,560, a rank keeps 41,984"),
    (page.first, no_logsumexp, "you say 16,384, a rank keeps 16,896 bytes"),
    (page.first, lambda *case: 7, "expected a pair, the bytes kept and the bytes sent; you say 7"),
    (page.second, mean_of_softmaxes, "2 blocks: the output is not that of attention over all keys"),
    (page.second, without_the_largest, "2 blocks: the output has nan"),
    (page.second, sum_of_logs, "2 blocks: the logsumexp is not that of attention over all keys"),
    (page.second, lambda outs, lses: (outs[0], lses), "1 blocks: the logsumexp is (1, 2, 6), expected (2, 6)")])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
