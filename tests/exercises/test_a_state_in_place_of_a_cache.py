"""Right answers pass, wrong and unanswered ones do not."""

import math

import torch
from exercises_kit import Answers, graded

from exercises import a_state_in_place_of_a_cache as page
from refimpl.attention import delta_rule_bytes
from refimpl.attention.linear.chunks import chunk_numbers


def best_chunk(T, D, V):
    sizes = [2**n for n in range(T.bit_length())]
    return min(sizes, key=lambda C: delta_rule_bytes((1, 1, T, D), (1, 1, T, V), chunk=C).peak)


def by_its_terms(T, D, V):
    """The terms that depend on C alone; a search from below, since they fall and then rise."""
    C = 1
    while 2 * C <= T and terms(2 * C, T, D, V) < terms(C, T, D, V):
        C *= 2
    return C


def terms(C, T, D, V):
    return T / C * D * V + chunk_numbers(C, D, V, True)[1]


def on_a_list(T, D, V):
    sizes = [2**n for n in range(int(math.log2(T)) + 1)]
    return sorted((delta_rule_bytes((3, 8, T, D), (3, 8, T, V), chunk=C).peak, C) for C in sizes)[0][1]


def keep_apart(log_decay, ids):
    begins = torch.zeros_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return log_decay.masked_fill(begins.unsqueeze(1), -50.0)


def by_differences(log_decay, ids):
    return log_decay - 80.0 * ids.diff(dim=-1, prepend=ids[:, :1]).ne(0)[:, None].to(log_decay.dtype)


def token_by_token(log_decay, ids):
    found = log_decay.clone()
    for b, row in enumerate(ids.tolist()):
        for t in range(1, len(row)):
            if row[t] != row[t - 1]:
                found[b, :, t] = -60.0
    return found


def starts(ids):
    return (ids[:, 1:] != ids[:, :-1])[:, None]


def filled(log_decay, ids, value, at=slice(1, None)):
    found = log_decay.clone()
    found[:, :, at] = found[:, :, at].masked_fill(starts(ids), value)
    return found


ANSWERS = {
    page.first: Answers(
        right=[best_chunk, by_its_terms, on_a_list],
        wrong=[
            (lambda T, D, V: 64, "256 tokens, D = 64, V = 64: chunks of 64 take"),
            (lambda T, D, V: T, "1,024 tokens, D = 64, V = 64: chunks of 1024 take 20,250,628 bytes at the peak"),
            (lambda T, D, V: 1, "chunks of 1 take"), (lambda T, D, V: math.isqrt(T), "chunks of 32 take"),
            (lambda T, D, V: 2 ** round(math.log2(T) / 2), "chunks of 32 take"),
            (lambda T, D, V: (T * D * V / 12) ** (1 / 3), "is not a power of two from 1 to 1,024"),
            (lambda T, D, V: 2 * best_chunk(T, D, V), "chunks of 128 take"),
            (lambda T, D, V: 4 * T, "4096 is not a power of two from 1 to 1,024"),
            (lambda T, D, V: best_chunk(T, V, D), "32,768 tokens, D = 16, V = 128: chunks of 256 take"),
            (lambda T, D, V: best_chunk(T, D, D), "4,096 tokens, D = 16, V = 256: chunks of 32 take")],
        same=("1 → 2",)),  # of a batch, or of heads
    page.second: Answers(
        right=[keep_apart, by_differences, token_by_token],
        wrong=[
            (lambda log_decay, ids: log_decay, "tokens 70 to 199 is not what it is alone"),
            (lambda log_decay, ids: filled(log_decay, ids, -math.inf), "log_decay has −∞, and −∞ − (−∞) is NaN"),
            (lambda log_decay, ids: filled(log_decay, ids, 0.0), "is not what it is alone"),
            (lambda log_decay, ids: filled(log_decay, ids, -2.0), "tokens 70 to 199 is not what it is alone"),
            (lambda log_decay, ids: filled(log_decay, ids, -50.0, slice(0, -1)), "tokens 0 to 69 is not what it is"),
            (lambda log_decay, ids: filled(log_decay, ids, -1e6), "a sum that has -1,000,000 in it keeps few digits"),
            (lambda log_decay, ids: keep_apart(log_decay, ids[:1]), "tokens 0 to 129 is not what it is alone"),
            (lambda log_decay, ids: keep_apart(log_decay, ids).exp(), "a number above 0: a would be more than 1"),
            (lambda log_decay, ids: keep_apart(log_decay, ids)[:, :1], "log_decay has the shape (2, 1, 200)"),
            (lambda log_decay, ids: 60 * (keep_apart(log_decay, ids) < -40).float() * -1, "is not what it is alone")]),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
