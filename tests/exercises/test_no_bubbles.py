"""Right answers pass, wrong and unanswered ones do not."""

import pytest

from refimpl.exercises import no_bubbles as page


def predict(ranks, micro_batches, F, B, W):
    return (ranks - 1) * (F + B - W), ranks


def as_1f1b(ranks, micro_batches, F, B, W):
    return (ranks - 1) * (F + B + W), ranks


def all_in_flight(ranks, micro_batches, F, B, W):
    return (ranks - 1) * (F + B - W), micro_batches


def written(p, m, ahead, behind):
    """For each rank: some forwards ahead, then F and B in turn, Ws behind."""
    orders = []
    for r in range(p):
        order, waiting, first = [], [], min(ahead(r), m)
        order += [("F", r, j) for j in range(first)]
        for j in range(m):
            order += [("F", r, first + j)] * (first + j < m) + [("B", r, j)]
            waiting.append(("W", r, j))
            if len(waiting) > behind(r):
                order.append(waiting.pop(0))
        orders.append(order + waiting)
    return orders


def zb_h2(p, m):
    return written(p, m, lambda r: 2 * (p - 1 - r), lambda r: 2 * r)


def zb_h1(p, m):
    return written(p, m, lambda r: p - 1 - r, lambda r: r)


def one_more_ahead(p, m):
    return written(p, m, lambda r: 2 * (p - 1 - r) + 1, lambda r: 2 * r)


def every_w_last(p, m):
    return written(p, m, lambda r: 2 * (p - 1 - r), lambda r: m)


def last_rank_ahead(p, m):
    """Deadlocks: the last rank's first backward comes after more forwards than the first rank does ahead."""
    orders = written(p, m, lambda r: p - 1 - r, lambda r: r)
    orders[-1] = [("F", p - 1, j) for j in range(m)] + [each for each in orders[-1] if each[0] != "F"]
    return orders


def without_the_last_w(p, m):
    return [order[:-1] for order in zb_h2(p, m)]


def peak(order, whole, kept):
    now = most = 0
    for kind, s, _ in order:
        now += {"F": whole[s], "B": kept[s] - whole[s], "W": -kept[s], "FULL": -whole[s]}[kind]
        most = max(most, now)
    return most


def freed_by_b(order, whole, kept):
    return peak(order, whole, [0] * len(kept))


def kept_whole(order, whole, kept):
    return peak(order, whole, whole)


@pytest.mark.parametrize(("exercise", "answer"), [(page.first, predict), (page.second, zb_h2), (page.third, peak)])
def test_right_answers(said, exercise, answer):
    assert "right, on parity and on bytes" in said(exercise, answer)


@pytest.mark.parametrize(("exercise", "answer", "complaint"), [
    (page.first, as_1f1b, "2 ranks, 4 micro-batches, F, B, W = [1, 1, 1]: you say 3, rank 0 idles 1"),
    (page.first, all_in_flight, "you say 4, rank 0 holds 2"),
    (page.first, lambda *case: 3, "expected a pair, the idle time and the activations; you say 3"),
    (page.second, zb_h1, "2 ranks, 4 micro-batches, F, B, W = (1, 1, 1): it can run, but a rank idles 1; 0 is enough"),
    (page.second, every_w_last, "it can run, but a rank idles 2; 0 is enough"),
    (page.second, one_more_ahead, "idle time is right, but rank 0 holds 4 activations; 3 are enough"),
    (page.second, last_rank_ahead, "2 ranks, 4 micro-batches: schedule 'yours' deadlocks: rank 0 is at B of stage 0"),
    (page.second, without_the_last_w, "rank 0 lacks W of stage 0, micro-batch 3: expected once"),
    (page.second, lambda p, m: zb_h2(p, m)[1:], "expected 2 lists, you give 1"),
    (page.third, freed_by_b, "rank 0 of zb-h1: you say 4,000, it holds 4,300 bytes at once"),
    (page.third, kept_whole, "rank 0 of zb-h1: you say 4,000, it holds 4,300 bytes at once"),
    (page.third, lambda order, whole, kept: 8 * whole[0], "rank 0 of 1f1b: you say 8,000, it holds 4,000 bytes")])
def test_wrong_answers(said, exercise, answer, complaint):
    assert complaint in said(exercise, answer)


@pytest.mark.parametrize("exercise", [page.first, page.second, page.third])
def test_blank_answers(said, exercise):
    assert "not answered yet" in said(exercise, lambda *args: None)
