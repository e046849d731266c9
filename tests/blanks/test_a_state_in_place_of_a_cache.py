"""Ours and other right functions pass, wrong and unanswered ones do not."""

from functools import partial

import torch
from exercises_kit import Answers, graded

from blanks import a_state_in_place_of_a_cache as page


def by_the_inverse(q, k, v, beta, gamma, fading, s):
    """Inverts I + A, and divides k by γ nowhere."""
    a = (beta * (k @ k.mT) * fading).tril(-1)
    eye = torch.eye(a.shape[-1], dtype=a.dtype)
    u = torch.linalg.inv(eye + a) @ (beta * v - beta * gamma * (k @ s))
    o = torch.cat([q * gamma, q @ k.mT * fading], -1) @ torch.cat([s, u], 2)
    return o, s * gamma[:, :, -1:] + torch.einsum("bhcd,bhc,bhcv->bhdv", k, fading[:, :, -1], u)


def row_by_row(q, k, v, beta, gamma, fading, s):
    """Substitutes forward: u of a token from those of the tokens before it."""
    right, a = beta * (v - gamma * (k @ s)), beta * (k @ k.mT) * fading
    u = right[:, :, :1]
    for i in range(1, q.shape[2]):
        u = torch.cat([u, right[:, :, i : i + 1] - a[:, :, i : i + 1, :i] @ u], 2)
    return gamma * (q @ s) + (q @ k.mT * fading) @ u, gamma[:, :, -1:] * s + (k * fading[:, :, -1, :, None]).mT @ u


def two_halves(q, k, v, beta, gamma, fading, s):
    """Solves the first half, then the second one."""
    half, right = q.shape[2] // 2, beta * (v - gamma * (k @ s))
    a = (beta * (k @ k.mT) * fading).tril(-1)
    first, second = slice(0, half), slice(half, None)
    u = torch.linalg.solve_triangular(a[:, :, first, first], right[:, :, first], upper=False, unitriangular=True)
    rest = right[:, :, second] - a[:, :, second, first] @ u
    u = torch.cat([u, torch.linalg.solve_triangular(
        a[:, :, second, second], rest, upper=False, unitriangular=True)], 2)
    return gamma * (q @ s) + (q @ k.mT * fading) @ u, gamma[:, :, -1:] * s + (k * fading[:, :, -1, :, None]).mT @ u


def token_by_token(q, k, v, beta, gamma, fading, s):
    """The recurrent form: autograd keeps a state for each token."""
    out = []
    for i in range(q.shape[2]):
        here = slice(i, i + 1)
        s = s * (gamma[:, :, here] if i == 0 else fading[:, :, here, i - 1 : i])
        s = s + k[:, :, here].mT @ (beta[:, :, here] * (v[:, :, here] - k[:, :, here] @ s))
        out.append(q[:, :, here] @ s)
    return torch.cat(out, 2), s


def with_fault(q, k, v, beta, gamma, fading, s, *, missing=True, delta=True, fades=True, old=True, rest="row",
               weighed=True, inner=True):
    right = (beta if weighed else 1) * (v - (gamma * (k @ s) if missing else 0))
    a = (beta if inner else 1) * (k @ k.mT) * (fading if fades else torch.ones_like(fading).tril())
    u = torch.linalg.solve_triangular(a, right, upper=False, unitriangular=True) if delta else right
    o = gamma * (q @ s) + (q @ k.mT * fading) @ u
    left = {"row": fading[:, :, -1, :, None], "quotient": gamma[:, :, -1:] / gamma, "gamma": gamma, "column": fading[
        :, :, :, :1], "none": 1.0}[rest]
    return o, (gamma[:, :, -1:] if old else 1) * s + (left * k).mT @ u


def future(q, k, v, beta, gamma, fading, s):
    """Every token sees the whole chunk."""
    _, last = page.chunk(q, k, v, beta, gamma, fading, s)
    return q @ last, last


fault = partial(partial, with_fault)
ANSWERS = {
    page.check_chunk: Answers(
        right=[page.chunk, by_the_inverse, row_by_row, two_halves],
        wrong=[
            (fault(missing=False), "nothing fades, 5 tokens: o is off by"),
            (fault(delta=False), "first at token 1"),
            (fault(fades=False), "gates, 16 tokens: o is off by"),
            (fault(weighed=False), "one token, 1 token: o is off by"),
            (fault(inner=False), "first at token 1"),
            (fault(old=False), "one token, 1 token: the state is off by"),
            (fault(rest="none"), "gates, 16 tokens: the state is off by"),
            (fault(rest="gamma"), "the state is off by"), (fault(rest="column"), "the state is off by"),
            (fault(rest="quotient"), "fast fading, 64 tokens: the state has NaN"),
            (future, "nothing fades, 5 tokens: o is off by"),
            (lambda *given: page.chunk(*given)[::-1], "o has the shape (2, 3, 4, 3)"),
            (lambda *given: tuple(x.float() for x in page.chunk(*given)), "torch.float32, expected"),
            (lambda *given: page.chunk(*given)[0], "expected 2 values (a tensor, a tensor)")],
        saves_nothing=(token_by_token, "right, but forward and backward of 64 tokens take ")),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
