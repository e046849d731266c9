"""Right answers pass, wrong and unanswered ones do not."""

import functools
import math

import torch
from exercises_kit import Answers, graded
from torch.utils.checkpoint import checkpoint

from exercises import attention_from_summaries as page
from refimpl.attention import memory_efficient_attention, reference_attention, tiled_attention

again = functools.partial(checkpoint, use_reentrant=False)
without_random_state = functools.partial(again, preserve_rng_state=False)


def plainly(function, *given):
    return function(*given)


def merge(out_a, lse_a, out_b, lse_b, *, blind_rows=True):
    """Without a care for blind rows, −∞ − (−∞) is NaN."""
    lse = torch.logaddexp(lse_a, lse_b)
    top = lse.masked_fill(lse == -math.inf, 0) if blind_rows else lse
    a, b = ((x - top).exp().unsqueeze(-1) for x in (lse_a, lse_b))
    return a * out_a + b * out_b, lse


def merge_of_sums(out_a, lse_a, out_b, lse_b):
    """Overflows."""
    a, b = lse_a.exp(), lse_b.exp()
    return (a[..., None] * out_a + b[..., None] * out_b) / (a + b)[..., None], (a + b).log()


def merge_of_stacks(out_a, lse_a, out_b, lse_b):
    """Right, with copies of both outputs."""
    outs, lses = torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b))
    lse = lses.logsumexp(dim=0)
    return ((lses - lse.masked_fill(lse == -math.inf, 0)).exp()[..., None] * outs).sum(dim=0), lse


def mean_of_halves(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


def summary(q, k, v):
    s = q @ k.mT
    m = s.detach().amax(-1, keepdim=True)
    p = (s - m).exp()
    return m, p.sum(-1, keepdim=True), p @ v


def some_queries(q, k, v, c, inner, top=True):
    parts = [inner(summary, q, *chunk) for chunk in zip(k.split(c, 2), v.split(c, 2), strict=True)]
    highest = functools.reduce(torch.maximum, [m for m, *_ in parts]) if top else 0.0
    weights = [(m - highest).exp() for m, *_ in parts]
    total = sum(w * part[1] for w, part in zip(weights, parts, strict=True))
    return sum(w * part[2] for w, part in zip(weights, parts, strict=True)) / total


def in_turn(q, k, v, rows, c, outer=again, inner=again, scaled=True, top=True):
    q = q * q.shape[-1] ** -0.5 if scaled else q
    return torch.cat([outer(some_queries, part, k, v, c, inner, top) for part in q.split(rows, 2)], 2)


def without_a_graph(q, k, v, rows, c):
    """The right output, whose gradients do not reach k and v."""
    return in_turn(q, k.detach(), v.detach(), rows, c) + 0 * (k + v)


def hardened(q, k, v, rows, c):
    return memory_efficient_attention(q, k, v, query_chunk=rows, key_chunk=c)


ANSWERS = {
    page.first: Answers(
        right=[merge],
        wrong=[
            (mean_of_halves, "plain halves: the out is not that of all keys"),
            (lambda out_a, lse_a, out_b, lse_b: (merge(out_a, lse_a, out_b, lse_b)[0], lse_a + lse_b), "plain halves: the logsumexp is not that of all keys"),
            (merge_of_sums, "large scores: the out is not that of all keys (NaN)"),
            (functools.partial(merge, blind_rows=False), "halves that some rows do not see: the out is not"),
            (merge_of_stacks, "right, but it took")],
    ),
    page.second: Answers(
        right=[in_turn, hardened],
        wrong=[
            (functools.partial(in_turn, scaled=False), "100 tokens: the output is not that of attention"),
            (functools.partial(in_turn, top=False), "100 tokens: the output is not that of attention"),
            (without_a_graph, "100 tokens: the dk is not that of attention"),
            (lambda q, k, v, rows, c: reference_attention(q, k, v), "right, but it keeps"),
            (functools.partial(in_turn, inner=plainly, outer=plainly), "right, but it keeps"),
            (functools.partial(in_turn, outer=plainly), "right, but it keeps"),
            (lambda q, k, v, rows, c: in_turn(q, k, v, q.shape[2], 4, without_random_state, without_random_state), "right, but its peak is")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


def test_one_that_keeps_little_and_makes_all_weights_at_once_fails(said):
    assert "right, but its peak is" in said(page.second, lambda q, k, v, rows, c: again(reference_attention, q, k, v))


def test_tiles_keep_a_logsumexp_more_and_pass(said):
    assert "right, on parity" in said(page.second, lambda q, k, v, rows, c: tiled_attention(
        q, k, v, query_tile=rows, key_tile=c))
