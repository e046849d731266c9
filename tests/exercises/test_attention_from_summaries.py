"""Right answers pass, wrong and unanswered ones do not."""

import functools
import math

import torch
from exercises_kit import Answers, graded
from torch.utils.checkpoint import checkpoint

from exercises import attention_from_summaries as page
from refimpl.attention import memory_efficient_attention, reference_attention, tiled_attention

# --- first -----------------------------------------------------------------------------------------------------------


def merge(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    top = lse.masked_fill(lse == -math.inf, 0)  # −∞ − (−∞) would be NaN
    a, b = (lse_a - top).exp(), (lse_b - top).exp()
    return a.unsqueeze(-1) * out_a + b.unsqueeze(-1) * out_b, lse


def merge_by_maximum(out_a, lse_a, out_b, lse_b):
    m = torch.maximum(lse_a, lse_b).clamp(min=torch.finfo(lse_a.dtype).min)
    a, b = torch.exp(lse_a - m)[..., None], torch.exp(lse_b - m)[..., None]
    total = a + b
    out = a / total.clamp(min=1) * out_a
    out.addcmul_(b / total.clamp(min=1), out_b)
    return out, torch.where(total[..., 0] > 0, m + total[..., 0].log(), -math.inf)


def merge_by_sigmoid(out_a, lse_a, out_b, lse_b):
    share = torch.sigmoid(lse_a - lse_b).nan_to_num(0.0)  # NaN where both are −∞: both outputs are 0 there
    return [torch.lerp(out_b, out_a, share[..., None]), torch.stack((lse_a, lse_b)).logsumexp(dim=0)]


def merge_with_fault(out_a, lse_a, out_b, lse_b, *, top=lambda lse: lse.masked_fill(lse == -math.inf, 0), swap=False):
    lse = torch.logaddexp(lse_a, lse_b)
    a, b = ((x - top(lse)).exp().unsqueeze(-1) for x in (lse_a, lse_b))
    return (b * out_a + a * out_b if swap else a * out_a + b * out_b), lse


def merge_of_sums(out_a, lse_a, out_b, lse_b):
    """Overflows."""
    a, b = lse_a.exp(), lse_b.exp()
    total = (a + b).clamp(min=1e-30)
    return (a[..., None] * out_a + b[..., None] * out_b) / total[..., None], (a + b).log()


def merge_of_stacks(out_a, lse_a, out_b, lse_b):
    """Right, with copies of both outputs."""
    outs, lses = torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b))
    lse = lses.logsumexp(dim=0)
    return ((lses - lse.masked_fill(lse == -math.inf, 0)).exp()[..., None] * outs).sum(dim=0), lse


def mean_of_parts(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, torch.logaddexp(lse_a, lse_b)


def the_first_has_seen(out_a, lse_a, out_b, lse_b):
    """Handles rows that see nothing of b, or of both, but not those that see nothing of a."""
    lse = torch.where(lse_a == -math.inf, lse_a, torch.logaddexp(lse_a, lse_b))
    top = lse.masked_fill(lse == -math.inf, 0)
    return (lse_a - top).exp()[..., None] * out_a + (lse_b - top).exp()[..., None] * out_b, lse


# --- second ----------------------------------------------------------------------------------------------------------


def summary(q, k, v):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    m = scores.detach().amax(dim=-1, keepdim=True)
    p = (scores - m).exp()
    return m, p.sum(dim=-1, keepdim=True), p @ v


def some_queries(q, k, v, c):
    parts = [checkpoint(summary, q, *chunk, use_reentrant=False)
             for chunk in zip(k.split(c, dim=2), v.split(c, dim=2), strict=True)]
    top = functools.reduce(torch.maximum, [m for m, _, _ in parts])
    total = sum((m - top).exp() * each for m, each, _ in parts)
    return sum((m - top).exp() * out for m, _, out in parts) / total


def in_turn(q, k, v, rows, c):
    parts = [checkpoint(some_queries, part, k, v, c, use_reentrant=False) for part in q.split(rows, dim=2)]
    return torch.cat(parts, dim=2)


def hardened(q, k, v, rows, c):
    return memory_efficient_attention(q, k, v, query_chunk=rows, key_chunk=c)


def by_logsumexp(q, k, v, rows, c):
    def chunk(q, k, v):
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(q.shape[-1])
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=True)

    def row(q, k, v):
        out, lse = 0, torch.full_like(q[..., :1], -math.inf)
        for at in range(0, k.shape[2], c):
            new, level = checkpoint(chunk, q, k[:, :, at : at + c], v[:, :, at : at + c], use_reentrant=False)
            both = torch.logaddexp(lse, level)
            out, lse = out * (lse - both).exp() + new * (level - both).exp(), both
        return out

    return torch.cat([checkpoint(row, q[:, :, at : at + rows], k, v, use_reentrant=False)
                      for at in range(0, q.shape[2], rows)], dim=2)


def tiles(q, k, v, rows, c):
    """A backward of its own, which keeps a logsumexp more."""
    return tiled_attention(q, k, v, query_tile=rows, key_tile=c)


again = functools.partial(checkpoint, use_reentrant=False)
without_random_state = functools.partial(again, preserve_rng_state=False)


def plainly(function, *given):
    return function(*given)


def rows_alone(q, k, v, rows, c):
    """Some queries at a time, all keys at once: the peak and what is kept are small enough."""
    return torch.cat([again(reference_attention, part, k, v) for part in q.split(rows, dim=2)], dim=2)


def other_summary(scale, detach, q, k, v):
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale else 1)
    m = (s.detach() if detach else s).amax(-1, keepdim=True)
    p = (s - m).exp()
    return m, p.sum(-1, keepdim=True), p @ v


def other_queries(q, k, v, c, inner, top, scale, chunks):
    tiles = list(zip(k.split(c, 2), v.split(c, 2), strict=True))[:chunks]
    parts = [inner(functools.partial(other_summary, scale, True), q, *chunk) for chunk in tiles]
    highest = functools.reduce(torch.maximum, [m for m, *_ in parts]) if top else 0.0
    weights = [(m - highest).exp() if top is not None else 1.0 for m, *_ in parts]
    total = sum(w * part[1] for w, part in zip(weights, parts, strict=True))
    return sum(w * part[2] for w, part in zip(weights, parts, strict=True)) / total


def with_fault(q, k, v, rows, c, *, outer=again, inner=again, top=True, scale=True, chunks=None, dim=2):
    return torch.cat([outer(other_queries, part, k, v, c, inner, top, scale, chunks) for part in q.split(rows, 2)], dim)


def without_a_graph(q, k, v, rows, c):
    """The right output, whose gradients do not reach k and v."""
    return in_turn(q, k.detach(), v.detach(), rows, c)


def under_no_grad(q, k, v, rows, c):
    with torch.no_grad():
        return in_turn(q, k, v, rows, c)


def whole_rows_alone(q, k, v, rows, c):
    return in_turn(q[:, :, : q.shape[2] // rows * rows], k, v, rows, c)


def without_its_bytes(q, k, v, rows, c):
    out = in_turn(q, k, v, rows, c)
    out.untyped_storage().resize_(0)
    return out


def raises_in_backward(q, k, v, rows, c):
    out = in_turn(q, k, v, rows, c)
    out.register_hook(lambda gradient: gradient.view(7))
    return out


fault = functools.partial(functools.partial, with_fault)
ANSWERS = {
    page.first: Answers(
        right=[merge, merge_by_maximum, merge_by_sigmoid],
        wrong=[
            (mean_of_parts, "parts of 90 and 150 keys: the out is not that of all keys"),
            (lambda out_a, lse_a, out_b, lse_b: (0.375 * out_a + 0.625 * out_b, torch.logaddexp(lse_a, lse_b)),
             "parts of 90 and 150 keys: the out is not that of all keys"),
            (functools.partial(merge_with_fault, swap=True), "parts of 90 and 150 keys: the out is not that"),
            (lambda *parts: (merge(*parts)[0], parts[1] + parts[3]), "keys: the logsumexp is not that of all keys"),
            (lambda *parts: (merge(*parts)[0], torch.maximum(parts[1], parts[3])), "keys: the logsumexp is not that"),
            (lambda *parts: (merge(*parts)[0], merge(*parts)[1].exp()), "keys: the logsumexp is not that of all keys"),
            (merge_of_sums, "large scores: the out is not that of all keys (it has NaN)"),
            (functools.partial(merge_with_fault, top=lambda lse: lse),
             "parts that some rows do not see: the out is not that of all keys (it has NaN)"),
            (the_first_has_seen, "parts that some rows do not see: the out is not that of all keys"),
            (lambda *parts: merge(*parts)[::-1], "the out has the shape (2, 3, 120) and torch.float32, expected (2, 3"),
            (lambda *parts: (merge(*parts)[0], merge(*parts)[1].unsqueeze(-1)), "the logsumexp has the shape"),
            (lambda *parts: merge(*parts)[0], "expected 2 values (a tensor, a tensor)")],
        saves_nothing=(merge_of_stacks, "and an output is 184,320"),
        same=("lse_a, lse_b → lse_b, lse_a", "0 → 1"),
    ),
    page.second: Answers(
        right=[in_turn, hardened, by_logsumexp, tiles, rows_alone],
        wrong=[
            (fault(scale=False), "100 tokens: the output is not that of attention"),
            (fault(top=False), "100 tokens: the output is not that of attention (it has NaN)"),
            (fault(top=None), "100 tokens: the output is not that of attention"),
            (fault(chunks=-1), "100 tokens: the output is not that of attention"),
            (fault(dim=0), "your function raises RuntimeError: Sizes of tensors must match"),
            (whole_rows_alone, "100 tokens: the output has the shape (2, 3, 90, 32)"),
            (without_a_graph, "100 tokens: the dk is not that of attention"),
            (under_no_grad, "the output is right, and has no graph"),
            (without_its_bytes, "100 tokens: the output is not that of attention"),
            (raises_in_backward, "your function raises RuntimeError"),
            (lambda q, k, v, rows, c: reference_attention(q, k, v), "right, but"),
            (fault(inner=plainly, outer=plainly), "bytes wait for backward; 786,432 are enough"),
            (fault(outer=plainly), "bytes wait for backward; 786,432 are enough"),
            (lambda q, k, v, rows, c: again(reference_attention, q, k, v), "right, but its peak is"),
            (lambda q, k, v, rows, c: with_fault(q, k, v, q.shape[2], 4, outer=without_random_state,
                                                 inner=without_random_state), "right, but its peak is")],
        saves_nothing=(lambda q, k, v, rows, c: reference_attention(q, k, v), "bytes wait for backward; 786,432 are"),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
