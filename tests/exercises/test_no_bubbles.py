"""Right answers pass, wrong and unanswered ones do not."""

from functools import partial

from exercises_kit import Answers, graded

from exercises import no_bubbles as page


def predict(ranks, micro_batches, F, B, W, *, as_1f1b=False, all_in_flight=False):
    return (ranks - 1) * (F + B + (W if as_1f1b else -W)), micro_batches if all_in_flight else ranks


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


def zb_h2(p, m, more=0, every_w_last=False):
    return written(p, m, lambda r: 2 * (p - 1 - r) + more, lambda r: m if every_w_last else 2 * r)


def zb_h1(p, m):
    return written(p, m, lambda r: p - 1 - r, lambda r: r)


def last_rank_ahead(p, m):
    """Deadlocks: the last rank's first backward comes after more forwards than the first rank does ahead."""
    orders = zb_h1(p, m)
    orders[-1] = [("F", p - 1, j) for j in range(m)] + [each for each in orders[-1] if each[0] != "F"]
    return orders


def peak(order, whole, kept):
    now = most = 0
    for kind, s, _ in order:
        now += {"F": whole[s], "B": kept[s] - whole[s], "W": -kept[s], "FULL": -whole[s]}[kind]
        most = max(most, now)
    return most


ANSWERS = {
    page.first: Answers(
        right=[predict],
        wrong=[
            (partial(predict, as_1f1b=True), "2 ranks, 4 micro-batches, F, B, W = [1, 1, 1]: you say 3, rank 0 idles 1"),
            (partial(predict, all_in_flight=True), "you say 4, rank 0 holds 2"),
            (lambda *case: 3, "expected a pair, the idle time and the activations; you say 3")],
    ),
    page.second: Answers(
        right=[zb_h2],
        wrong=[
            (zb_h1, "2 ranks, 4 micro-batches, F, B, W = (1, 1, 1): it can run, but a rank idles 1; 0 is enough"),
            (partial(zb_h2, every_w_last=True), "it can run, but a rank idles 2; 0 is enough"),
            (partial(zb_h2, more=1), "idle time is right, but rank 0 holds 4 activations; 3 are enough"),
            (last_rank_ahead, "2 ranks, 4 micro-batches: schedule 'yours' deadlocks: rank 0 is at B of stage 0"),
            (lambda p, m: [order[:-1] for order in zb_h2(p, m)], "rank 0 lacks W of stage 0, micro-batch 3: expected once"),
            (lambda p, m: zb_h2(p, m)[1:], "expected 2 lists, you give 1")],
    ),
    page.third: Answers(
        right=[peak],
        wrong=[
            (lambda order, whole, kept: peak(order, whole, [0] * len(kept)), "rank 0 of zb-h1: you say 4,000, it holds 4,300 bytes at once"),
            (lambda order, whole, kept: peak(order, whole, whole), "rank 0 of zb-h1: you say 4,000, it holds 4,300 bytes at once"),
            (lambda order, whole, kept: 8 * whole[0], "rank 0 of 1f1b: you say 8,000, it holds 4,000 bytes")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
