"""Ours and other right functions pass, wrong and unanswered ones do not."""

import math
from functools import partial

import torch
from exercises_kit import Answers, graded

from blanks import masks_that_skip_tiles as page
from refimpl.papers import block_sparse as paper


def lists_by_the_paper(sees, T, N):
    own, paper.N = paper.N, N
    found, paper.N = paper.lists(sees, T), own
    return [found.get(R, []) for R in range(-(-T // N))]


def lists_of_rows(sees, T, N):
    """Asks for N queries and all keys at once, and copies what it keeps."""
    found = []
    for i in torch.arange(T).split(N):
        parts = sees(i[:, None], torch.arange(T)).split(N, 1)
        found.append([(C, None if part.all() else part.clone()) for C, part in enumerate(parts) if part.any()])
    return found


def cut_from_all(sees, T, N):
    i = torch.arange(T)
    return [[(C, None if x.all() else x) for C, x in enumerate(rows.split(N, 1)) if x.any()]
            for rows in sees(i[:, None], i).split(N)]


def lists_with_fault(sees, T, N, *, change=lambda C, seen: (C, seen), cut=lambda T, N: T, kept=lambda seen: True):
    return [[change(C, seen) for C, seen in listed if kept(seen)] for listed in page.lists(sees, cut(T, N), N)]


def attend_by_the_paper(q, k, v, blocks, N):
    own, paper.N = paper.N, N
    out, paper.N = paper.BlockSparse.apply(q, k, v, dict(enumerate(blocks))), own
    return out


def attend_row_by_row(q, k, v, blocks, N):
    """The listed blocks of a row beside each other, and one softmax: no online one."""
    out = torch.empty_like(q)
    for R, listed in enumerate(blocks):
        rows = slice(R * N, R * N + N)
        k_C, v_C = (torch.cat([x[:, :, C * N : C * N + N] for C, _ in listed], 2) for x in (k, v))
        s, at = q[:, :, rows] @ k_C.mT * q.shape[-1] ** -0.5, 0
        for C, seen in listed:
            width = min(N, k.shape[2] - C * N)
            if seen is not None:
                s[..., at : at + width].masked_fill_(~seen, -math.inf)
            at += width
        out[:, :, rows] = s.softmax(-1) @ v_C
    return out


def mask_of(blocks, T, N):
    mask = torch.zeros(T, T, dtype=torch.bool)
    for R, listed in enumerate(blocks):
        for C, seen in listed:
            mask[R * N : R * N + N, C * N : C * N + N] = True if seen is None else seen
    return mask


def masked_afterwards(q, k, v, blocks, N):
    """The page's fault: every product is computed, then masked."""
    s = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask_of(blocks, q.shape[2], N), -math.inf)
    return s.softmax(-1) @ v


def without_products(q, k, v, blocks, N):
    """Computes all pairs by sums, which no counter of matrix products sees."""
    s = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) * q.shape[-1] ** -0.5
    p = s.masked_fill(~mask_of(blocks, q.shape[2], N), -math.inf).softmax(-1)
    return (p[..., None] * v[..., None, :, :]).sum(-2)


def attend_with_fault(q, k, v, blocks, N, *, scale=True, start=-1e30, rises=True, shrinks=True, divides=True,
                      masks=True, partial_ones=True):
    out, keys, values = [], k.split(N, 2), v.split(N, 2)
    for q_R, listed in zip(q.split(N, 2), blocks, strict=True):
        m, total, o = torch.full_like(q_R[..., :1], start), 0.0, torch.zeros_like(q_R)
        for C, seen in listed if partial_ones else [each for each in listed if each[1] is None]:
            s = q_R @ keys[C].mT / (math.sqrt(q.shape[-1]) if scale else 1)
            s = s.masked_fill(~seen, -math.inf) if masks and seen is not None else s
            new = torch.maximum(m, s.amax(-1, keepdim=True)) if rises else torch.zeros_like(m)
            p, shrink = (s - new).exp(), (m - new).exp()
            total = shrink * total + p.sum(-1, keepdim=True)
            o, m = (shrink if shrinks else 1) * o + p @ values[C], new
        out.append(o / total if divides else o)
    return torch.cat(out, 2)


fault, fault_a = (partial(partial, each) for each in (lists_with_fault, attend_with_fault))
ANSWERS = {
    page.check_lists: Answers(
        right=[page.lists, lists_by_the_paper, lists_of_rows],
        wrong=[
            (cut_from_all, "is `seen` a view of the mask of all pairs?"),
            (fault(kept=lambda seen: seen is None), "block 0 of queries has blocks of keys []: expected [0]"),
            (fault(change=lambda C, seen: (C, None)), "block 0 is partial, expected `seen` to say so"),
            (fault(change=lambda C, seen: (C, torch.ones(16, 16).bool() if seen is None else seen)),
             "block 5 is full, expected `seen` to say so"),
            (fault(change=lambda C, seen: (C, seen if seen is None else ~seen)), "`seen` of block 0 is not which of"),
            (fault(change=lambda C, seen: (C, seen if seen is None else seen.float())), "`seen` of block 0 is not"),
            (fault(change=lambda C, seen: C), "is to have pairs (block, seen), yours is [0]"),
            (fault(cut=lambda T, N: T // N * N), "6 lists: expected 7, one for each block of queries"),
            (lambda sees, T, N: page.lists(lambda i, j: sees(j, i), T, N), "of keys [0, 1, 2]: expected [0]"),
            (lambda sees, T, N: [each for each in page.lists(sees, T, N) if each], "4 lists: expected 6, one for each"),
            (lambda sees, T, N: page.lists(sees, T, 16), "6 lists: expected 3")],
        same=("row + N, T → T, row + N", "column + N, T → T, column + N")),  # of min
    page.check_attend: Answers(
        right=[page.attend, attend_by_the_paper, attend_row_by_row],
        wrong=[
            (fault_a(scale=False), "a causal window of 20, 100 tokens in blocks of 16: the output is not that of the"),
            (fault_a(start=-math.inf), "the output is not that of the pairs that are seen (it has NaN)"),
            (fault_a(rises=False), "it has NaN"), (fault_a(shrinks=False), "the output is not that of the pairs"),
            (fault_a(divides=False), "the output is not that"), (fault_a(masks=False), "the output is not that"),
            (fault_a(partial_ones=False), "the output is not that"),
            (without_products, "in 512 tokens: right, but it takes"),
            (lambda q, k, v, blocks, N: page.attend(q, k, v, [listed[:1] for listed in blocks], N), "is not that")],
        saves_nothing=(masked_afterwards, "right, but it takes 3,840,000 FLOPs; the listed blocks take ")),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
