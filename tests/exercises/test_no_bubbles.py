"""Right answers pass, wrong and unanswered ones do not."""

import itertools
from functools import partial

from exercises_kit import Answers, graded

from exercises import no_bubbles as page
from refimpl.pipeline.named_schedules import idle_time, in_flight, schedule

# --- first -----------------------------------------------------------------------------------------------------------


def predict(ranks, micro_batches, F, B, W):
    return (ranks - 1) * (F + B - W), ranks


def by_closed_forms(ranks, micro_batches, F, B, W):
    return idle_time("zb-h1", ranks, F, B, W), in_flight("zb-h1", ranks, micro_batches)


def by_clock(ranks, micro_batches, F, B, W):
    """Follow rank 0 of the schedule: it waits for its first B, and then for what its Ws do not fill."""
    order = schedule("zb-h1", ranks, micro_batches).ranks[0]
    held = list(itertools.accumulate({"F": 1, "B": 0, "W": -1}[kind] for kind, *_ in order))
    until_first_backward = ranks * F + (ranks - 1) * B
    waits = until_first_backward - ranks * F + (ranks - 1) * (F - W)
    return float(waits), max(held)


def idles(of):
    return lambda p, m, F, B, W: (of(p, m, F, B, W), p)


def holds(of):
    return lambda p, m, F, B, W: ((p - 1) * (F + B - W), of(p, m))


# --- second ----------------------------------------------------------------------------------------------------------


def orders(ranks, micro_batches):
    return [order_of(rank, ranks, micro_batches) for rank in range(ranks)]


def order_of(rank, ranks, micro_batches):
    ahead = min(2 * (ranks - 1 - rank), micro_batches)
    order = [("F", rank, j) for j in range(ahead)]
    late = 0  # the next micro-batch whose W is due
    for j in range(micro_batches):
        if ahead + j < micro_batches:
            order.append(("F", rank, ahead + j))
        order.append(("B", rank, j))
        if j >= 2 * rank:
            order.append(("W", rank, late))
            late += 1
    return order + [("W", rank, j) for j in range(late, micro_batches)]


def from_library(ranks, micro_batches):
    return schedule("zb-h2", ranks, micro_batches).ranks


def by_sorting(ranks, micro_batches):
    """Give each instruction its place, and sort."""
    m, found = micro_batches, []
    for r in range(ranks):
        ahead = 2 * (ranks - 1 - r)
        places = [((max(0, j - ahead), 0 if j >= ahead else -1, j), ("F", r, j)) for j in range(m)]
        places += [((j, 1, j), ("B", r, j)) for j in range(m)]
        places += [((min(j + 2 * r, m), 2, j), ("W", r, j)) for j in range(m)]
        found.append([each for _, each in sorted(places)])
    return found


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


def gpipe(p, m):
    return [[(kind, r, j) for kind in "FBW" for j in range(m)] for r in range(p)]


def last_rank_ahead(p, m):
    """Deadlocks: the last rank's first backward comes after more forwards than the first rank does ahead."""
    orders = zb_h1(p, m)
    orders[-1] = [("F", p - 1, j) for j in range(m)] + [each for each in orders[-1] if each[0] != "F"]
    return orders


def w_before_b(p, m):
    return [[("W" if kind == "B" else "B" if kind == "W" else kind, r, j) for kind, r, j in order]
            for order in zb_h2(p, m)]


def of_rank_0_on_all(p, m):
    return [orders(p, m)[0]] * p


def with_whole_backwards_on_rank_0(p, m):
    """What rank 0 computes is the same, but it is not cut in two."""
    first, *others = zb_h2(p, m)
    return [[("FULL" if kind == "B" else kind, *each) for kind, *each in first if kind != "W"], *others]


def flat(p, m):
    return [each for order in zb_h2(p, m) for each in order]


# --- third -----------------------------------------------------------------------------------------------------------


def peak(order, whole, kept):
    now = most = 0
    for kind, s, _ in order:
        now += {"F": whole[s], "B": kept[s] - whole[s], "W": -kept[s], "FULL": -whole[s]}[kind]
        most = max(most, now)
    return most


def by_what_is_there(order, whole, kept):
    """Keep a dict of all activations and their bytes."""
    there, sums = {}, []
    for kind, s, j in order:
        if kind in ("F", "B"):
            there[s, j] = whole[s] if kind == "F" else kept[s]
        else:
            del there[s, j]
        sums.append(sum(there.values()))
    return max(sums)


def by_sums(order, whole, kept):
    """Count, at each moment, the activations of each stage in each state."""
    def at(moment):
        done = [(kind, s) for kind, s, _ in order[: moment + 1]]
        count = done.count
        return sum((count(("F", s)) - count(("B", s)) - count(("FULL", s))) * whole[s]
                   + (count(("B", s)) - count(("W", s))) * kept[s] for s in range(len(whole)))

    return max(map(at, range(len(order))))


def with_changes(**other):
    """Return an answer that counts some kinds otherwise: functions of (whole[s], kept[s])."""
    def answer(order, whole, kept):
        changes = {"F": lambda w, k: w, "B": lambda w, k: k - w, "W": lambda w, k: -k, "FULL": lambda w, k: -w, **other}
        return max(itertools.accumulate(changes[kind](whole[s], kept[s]) for kind, s, _ in order))

    return answer


def of_one_stage(order, whole, kept):
    """Take all stages of the rank as large as the first."""
    s = order[0][1]
    return peak(order, [whole[s]] * len(whole), [kept[s]] * len(kept))


def by_micro_batch(order, whole, kept):
    """Take the micro-batch for the stage."""
    return peak([(kind, j % len(whole), j) for kind, _, j in order], whole, kept)


ANSWERS = {
    page.first: Answers(
        right=[predict, by_closed_forms, by_clock],
        wrong=[
            (idles(lambda p, m, F, B, W: (p - 1) * (F + B + W)), "2 ranks, 4 micro-batches, F, B, W = [1, 1, 1]: you "
             "say 3, rank 0 idles 1"),
            (idles(lambda p, m, F, B, W: (p - 1) * (F + B)), "you say 2, rank 0 idles 1"),
            (idles(lambda p, m, F, B, W: p * (F + B - W)), "you say 2, rank 0 idles 1"),
            (idles(lambda p, m, F, B, W: (p - 1) * (F + B - 2 * W)), "you say 0, rank 0 idles 1"),
            (idles(lambda p, m, F, B, W: (p - 1) * F), "4 ranks, 8 micro-batches, F, B, W = [2, 3, 1]: you say 6, rank "
             "0 idles 12"),
            (idles(lambda p, m, F, B, W: (p - 1) * B), "F, B, W = [2, 3, 1]: you say 9, rank 0 idles 12"),
            (idles(lambda p, m, F, B, W: (p - 1) * (F + B - W) / (m * (F + B + W))), "you say 0.0833"),
            (idles(lambda p, m, F, B, W: (p - 1) * max(B, F + B - 2 * W)), "F, B, W = [2, 3, 1]: you say 9, rank 0"),
            (holds(lambda p, m: m), "2 ranks, 4 micro-batches, F, B, W = [1, 1, 1]: you say 4, rank 0 holds 2"),
            (holds(lambda p, m: 2 * p - 1), "you say 3, rank 0 holds 2"),
            (holds(lambda p, m: p - 1), "you say 1, rank 0 holds 2"),
            (holds(lambda p, m: m // 2), "8 ranks, 32 micro-batches, F, B, W = [4, 5, 3]: you say 16, rank 0 holds 8"),
            (lambda *case: predict(*case)[::-1], "you say 2, rank 0 idles 1"),
            (lambda *case: 3, "expected 2 values (a number, a number), you return 3")],
    ),
    page.second: Answers(
        right=[orders, from_library, by_sorting, zb_h2],
        wrong=[
            (zb_h1, "2 ranks, 4 micro-batches, F, B, W = (1, 1, 1): it can run, but rank 0 idles 1; 0 is enough"),
            (gpipe, "F, B, W = (1, 1, 1): it can run, but rank 0 idles"),
            (lambda p, m: written(p, m, lambda r: 2 * (p - 1 - r), lambda r: 0), "it can run, but rank 0 idles"),
            (lambda p, m: written(p, m, lambda r: 2 * (p - 1 - r), lambda r: r), "it can run, but rank 0 idles"),
            (partial(zb_h2, every_w_last=True), "it can run, but rank 0 idles 2; 0 is enough"),
            (partial(zb_h2, more=1), "idle time is right, but rank 0 holds 4 activations; 3 are enough"),
            (last_rank_ahead, "2 ranks, 4 micro-batches: schedule 'yours' deadlocks: rank 0 is at B of stage 0"),
            (w_before_b, "expected F before B before W"),
            (of_rank_0_on_all, "stage 0 is on rank 0"),
            (lambda p, m: [order[:-1] for order in zb_h2(p, m)], "lacks W of stage 0, micro-batch 3: expected once"),
            (lambda p, m: [order[1:] for order in zb_h2(p, m)], "lacks F of stage 0, micro-batch 0: expected once"),
            (lambda p, m: [order + order[-1:] for order in zb_h2(p, m)], "has W of stage 0, micro-batch 3 twice"),
            (lambda p, m: zb_h2(p, m - 1), "2 ranks, 4 micro-batches: rank 0 lacks F of stage 0, micro-batch 3"),
            (lambda p, m: zb_h2(p, 4), "4 ranks, 8 micro-batches: rank 0 lacks F of stage 0, micro-batch 4"),
            (lambda p, m: zb_h2(2, m), "4 ranks, 8 micro-batches: expected 4 lists, you give 2"),
            (lambda p, m: [[(kind, r, j + 1) for kind, r, j in order] for r, order in enumerate(zb_h2(p, m))],
             "expected a micro-batch of 0 to 3"),
            (lambda p, m: [[(kind.lower(), *each) for kind, *each in order] for order in zb_h2(p, m)],
             "expected kinds F, B and W, you give b, f, w, too"),
            (with_whole_backwards_on_rank_0, "expected kinds F, B and W, you give FULL, too"),
            (lambda p, m: zb_h2(p, m)[1:], "expected 2 lists, you give 1"),
            (lambda p, m: [[each[:2] for each in order] for order in zb_h2(p, m)],
             "expected 3 values (a text, a number, a number), you return ('F', 0)"),
            (flat, "expected 3 values (a text, a number, a number), you return 'F'")],
        same=("2 * (ranks - 1 - rank), micro_batches → micro_batches, 2 * (ranks - 1 - rank)",),
    ),
    page.third: Answers(
        right=[peak, by_what_is_there, by_sums],
        wrong=[
            (with_changes(B=lambda w, k: -w, W=lambda w, k: 0), "rank 0 of zb-h1: you say 4,000, it holds 4,300 bytes"),
            (with_changes(B=lambda w, k: 0, W=lambda w, k: -w), "rank 0 of zb-h1: you say 4,000, it holds 4,300 bytes"),
            (with_changes(B=lambda w, k: k), "rank 0 of zb-h1: you say"),
            (with_changes(W=lambda w, k: -w), "of zb-h1: you say"),
            (with_changes(B=lambda w, k: min(0, k - w)), "rank 0 of zb-h1: you say"),
            (with_changes(FULL=lambda w, k: 0), "rank 0 of 1f1b: you say 8,000, it holds 4,000 bytes at once"),
            (with_changes(FULL=lambda w, k: -k), "of 1f1b: you say"),
            (with_changes(F=lambda w, k: max(w, k)), "rank 0 of 1f1b: you say"),
            (of_one_stage, "rank 0 of zb-v: you say"),
            (by_micro_batch, "of 1f1b: you say"),
            (lambda order, whole, kept: sum(whole[s] for kind, s, _ in order if kind == "F"), "rank 0 of 1f1b: you say "
             "8,000, it holds 4,000"),
            (lambda order, whole, kept: max(whole[s] for _, s, _ in order), "rank 0 of 1f1b: you say 1,000, it holds"),
            (lambda order, whole, kept: peak(order, [1] * 8, [1] * 8), "rank 0 of 1f1b: you say 4, it holds 4,000")],
        same=("most, now → now, most",),
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
