"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from exercises import masks_that_skip_tiles as page


def transposed(by_query):
    by_key = [[] for _ in by_query]
    for R, listed in enumerate(by_query):
        for C, seen in listed:
            by_key[C].append((R, seen))
    return by_key


def transposed_by_dicts(by_query):
    rows = [dict(listed) for listed in by_query]
    return [[(R, row[C]) for R, row in enumerate(rows) if C in row] for C in range(len(rows))]


def transposed_by_sorting(by_query):
    found = sorted(((C, R, seen) for R, each in enumerate(by_query) for C, seen in each), key=lambda each: each[:2])
    return [[(R, seen) for own, R, seen in found if own == C] for C in range(len(by_query))]


def changed(by_query, change):
    return [change(listed) for listed in transposed(by_query)]


def key_gradients(q, k, v, d_out, lse, delta, by_key, N):
    q_, d_, lse_, delta_ = (x.split(N, 2) for x in (q, d_out, lse, delta))
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for C, listed in enumerate(by_key):
        keys = slice(C * N, C * N + N)
        for R, seen in listed:
            s = q_[R] @ k[:, :, keys].mT * q.shape[-1] ** -0.5
            p = (s if seen is None else s.masked_fill(~seen, -torch.inf)).sub(lse_[R]).exp()
            ds = p * (d_[R] @ v[:, :, keys].mT - delta_[R])
            dv[:, :, keys] += p.mT @ d_[R]
            dk[:, :, keys] += ds.mT @ q_[R] * q.shape[-1] ** -0.5
    return dk, dv


def gradients_with_fault(q, k, v, d_out, lse, delta, by_key, N, *, every=False, hides=True, mean=True, scale=True, p=1):
    """The rows of a list beside each other, with a fault; without one it is right."""
    found, i = [], torch.arange(q.shape[2])
    for keys, listed in zip(i.split(N), by_key, strict=True):
        seen = torch.zeros(len(i), len(keys), dtype=torch.bool)
        for R, each in listed:
            seen[R * N : R * N + N] = True if each is None else each
        rows = i if every else torch.cat([i[R * N : R * N + N] for R, _ in listed]) if listed else i[:0]
        s = q[:, :, rows] @ k[:, :, keys].mT * q.shape[-1] ** -0.5
        weights = (s - lse[:, :, rows]).exp() * (seen[rows] if hides else 1)
        ds = weights * (d_out[:, :, rows] @ v[:, :, keys].mT - (delta[:, :, rows] if mean else 0))
        dk = ds.mT @ q[:, :, rows] * (q.shape[-1] ** -0.5 if scale else 1)
        found.append((dk, weights.mT ** p @ d_out[:, :, rows]))
    return tuple(torch.cat(each, 2) for each in zip(*found, strict=True))


def rows_gathered(*given):
    return gradients_with_fault(*given)


def gradients_by_autograd(q, k, v, d_out, lse, delta, by_key, N):
    """Differentiates the weights of each block."""
    q_, d_, lse_, delta_, dk, dv = *(x.split(N, 2) for x in (q, d_out, lse, delta)), [], []
    for k_C, v_C, listed in zip(k.split(N, 2), v.split(N, 2), by_key, strict=True):
        dk.append(torch.zeros_like(k_C))
        dv.append(torch.zeros_like(v_C))
        for R, seen in listed:
            s = (q_[R] @ k_C.mT / q.shape[-1] ** 0.5).masked_fill(torch.tensor(False) if seen is None else ~seen, -1e30)
            s.requires_grad_()
            with torch.enable_grad():
                p = (s - lse_[R]).exp()
            ds, = torch.autograd.grad(p, s, d_[R] @ v_C.mT - delta_[R])
            dk[-1] += ds.mT @ q_[R] / q.shape[-1] ** 0.5
            dv[-1] += p.detach().mT @ d_[R]
    return torch.cat(dk, 2), torch.cat(dv, 2)


fault, fault_g = (partial(partial, each) for each in (changed, gradients_with_fault))
ANSWERS = {
    page.first: Answers(
        right=[transposed, transposed_by_dicts, transposed_by_sorting],
        wrong=[
            (lambda by_query: by_query, "the list of block 0 of keys has blocks of queries [0]: expected [0, 1, 2]"),
            (fault(change=lambda each: each[::-1]), "has blocks of queries [2, 1, 0]: expected [0, 1, 2]"),
            (fault(change=lambda each: [(R, None) for R, _ in each]), "block 0 is partial, expected `seen` to say so"),
            (fault(change=lambda each: [(R, seen if seen is None else seen.mT) for R, seen in each]),
             "`seen` of block 0 is not which of its pairs are seen, (16, 16)"),
            (fault(change=lambda each: [R for R, _ in each]), "is to have pairs (block, seen), yours is [0, 1, 2]"),
            (lambda by_query: [each for each in transposed(by_query) if each], "2 lists: expected 6, one for"),
            (fault(change=lambda each: [one for one in each if one[1] is not None]), "queries [5]: expected [5, 6]")]),
    page.second: Answers(
        right=[key_gradients, rows_gathered, gradients_by_autograd],
        wrong=[
            (fault_g(hides=False), "a causal window of 20, 100 tokens in blocks of 16: dK is not that of the pairs"),
            (fault_g(mean=False), "dK is not"), (fault_g(scale=False), "dK is not"), (fault_g(p=2), "dV is not"),
            (lambda *given: key_gradients(*given)[::-1], "dK is not"),
            (lambda q, k, v, d, lse, delta, *given: key_gradients(q, k, v, d, 0 * lse, delta, *given), "dK is not")],
        saves_nothing=(fault_g(every=True), "a causal window of 20: right, but it takes 7,680,000 FLOPs; the listed")),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
