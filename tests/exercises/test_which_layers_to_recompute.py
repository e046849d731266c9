"""Right answers pass, wrong and unanswered ones do not."""

import math
from functools import partial

from exercises_kit import Answers, graded

from exercises import which_layers_to_recompute as page
from refimpl.checkpointing import extra_flops, gpt_costs, gpt_peak_bytes, optimal_schedule, segments_plan

# --- first -----------------------------------------------------------------------------------------------------------


def choose(layers, k):
    return list(range(k))


def choose_by_peak(layers, k):
    """Recompute one more layer at a time, the one that lowers the peak most."""
    chosen = []
    for _ in range(k):
        def peak(layer, chosen=tuple(chosen)):
            plan = [(i,) if i in (*chosen, layer) else i for i in range(layers)]
            return gpt_peak_bytes(page._config(layers), 2, 64, plan)

        chosen.append(min((i for i in range(layers) if i not in chosen), key=lambda i: (peak(i), i)))
    return tuple(chosen)


def choose_backwards(layers, k):
    """Keep the last layers: what they keep is used at once."""
    last = [layers - 1 - i for i in range(layers - k)]
    return [i for i in range(layers) if i not in last][::-1]


def evenly(layers, k):
    """Peaks no higher: the last layer is kept."""
    return [i * layers // k for i in range(k)]


# --- second ----------------------------------------------------------------------------------------------------------


def segments(n, s, a):
    return min(range(1, n + 1), key=lambda k: s * n / k + a * k)


def segments_by_root(n, s, a):
    below = max(1, min(n, math.floor(math.sqrt(n * s / a))))
    above = min(n, below + 1)
    return below if s * n / below + a * below <= s * n / above + a * above else above


def segments_by_steps(n, s, a):
    k = 1
    while k < n and s * n > a * k * (k + 1):  # one more segment saves more than it takes
        k += 1
    return k


def rounded(n, s, a, how=round):
    return max(1, min(n, how(math.sqrt(n * s / a))))


# --- third -----------------------------------------------------------------------------------------------------------


def fit(config, batch, sequence, budget):
    chain = gpt_costs(config, batch, sequence)
    return optimal_schedule(**vars(chain), budget=budget / 1.01).plan[:-1]


def fit_by_the_curve(config, batch, sequence, budget):
    """Ask for less and less until the closed form of the peak, with 1 % for the rest, is within the budget."""
    chain, asked = vars(gpt_costs(config, batch, sequence)), budget
    while True:
        plan = optimal_schedule(**chain, budget=asked).plan[:-1]
        if 1.01 * gpt_peak_bytes(config, batch, sequence, plan) <= budget:
            return plan
        asked = int(0.999 * asked)


def regions_of(first, last):
    """Yield every plan of the blocks first … last in which no block is in a region of a region of a region."""
    if first > last:
        yield []
        return
    for rest in regions_of(first + 1, last):
        yield [first, *rest]
    for j in range(first, last + 1):
        for rest in regions_of(j + 1, last):
            yield [tuple(range(first, j + 1)), *rest]
            for k in range(first, j):
                yield [(tuple(range(first, k + 1)), *range(k + 1, j + 1)), *rest]


def fit_by_trying(config, batch, sequence, budget):
    """Try plans from the cheapest on; the schedule, where none of them fits."""
    plans = sorted(regions_of(0, config.layers - 1), key=lambda plan: extra_flops(config, batch, sequence, plan))
    for plan in plans:
        if 1.01 * gpt_peak_bytes(config, batch, sequence, plan) <= budget:
            return plan
    return fit(config, batch, sequence, budget)


def fit_with(config, batch, sequence, budget, *, part=slice(0, -1), free=1.01):
    return optimal_schedule(**vars(gpt_costs(config, batch, sequence)), budget=budget / free).plan[part]


def fit_by_segments(config, batch, sequence, budget):
    return segments_plan(config.layers, round(config.layers**0.5))


def fit_first_blocks(config, batch, sequence, budget):
    """Recompute as many of the first blocks as it takes; regions of several blocks are not tried."""
    for k in range(config.layers + 1):
        plan = [(i,) if i < k else i for i in range(config.layers)]
        if 1.01 * gpt_peak_bytes(config, batch, sequence, plan) <= budget:
            break
    return plan


def fit_last_blocks(config, batch, sequence, budget):
    for k in range(config.layers + 1):
        plan = [(i,) if i >= config.layers - k else i for i in range(config.layers)]
        if 1.01 * gpt_peak_bytes(config, batch, sequence, plan) <= budget:
            break
    return plan


def fit_without_moments(config, batch, sequence, budget):
    """Forgets what operations hold for a moment."""
    c = gpt_costs(config, batch, sequence)
    return optimal_schedule(c.forward_times, c.activation_bytes, c.output_bytes, budget=budget / 1.01).plan[:-1]


ANSWERS = {
    page.first: Answers(
        right=[choose, choose_by_peak, choose_backwards, evenly],
        wrong=[
            (lambda layers, k: list(range(layers - k, layers)), "recomputing [4, 5] peaks at"),
            (lambda layers, k: list(range(1, k + 1)), "4 layers, k=3: recomputing [1, 2, 3] peaks at"),
            (lambda layers, k: list(range(k))[:-1] + [layers - 1], "recomputing [0, 5] peaks at"),
            (lambda layers, k: [(i + 1) * layers // k - 1 for i in range(k)], "recomputing [2, 5] peaks at"),
            (lambda layers, k: list(range(layers))[::-2][:k], "recomputing [3, 5] peaks at"),
            (lambda layers, k: [0, 1], "6 layers, k=4: you name [0, 1], expected 4 different layers"),
            (lambda layers, k: list(range(1, layers + 1))[-k:], "expected 2 different layers from 0 to 5"),
            (lambda layers, k: [0] * k, "you name [0, 0], expected 2 different layers"),
            (lambda layers, k: [*range(k), 0], "you name [0, 0, 1], expected 2 different layers"),
            (lambda layers, k: [(i,) if i < k else i for i in range(layers)], "in your list: expected a number"),
            (lambda layers, k: k, "expected a list")],
    ),
    page.second: Answers(
        right=[segments, segments_by_root, segments_by_steps],
        wrong=[
            (lambda n, s, a: math.isqrt(n), "n=100, s=4, a=1: 10 segments hold 50.00 bytes, the least is 40.00"),
            (rounded, "n=17, s=1, a=8: 1 segments hold 25.00 bytes, the least is 24.50"),
            (partial(rounded, how=math.floor), "the least is"),
            (partial(rounded, how=math.ceil), "the least is"),
            (lambda n, s, a: rounded(n, a, s), "n=100, s=4, a=1: 5 segments hold"),
            (lambda n, s, a: round(math.sqrt(n * s / a)), "n=12, s=16, a=1: you say 14, expected an integer from 1 to"),
            (lambda n, s, a: min(n, round(math.sqrt(n * s / a))), "n=7, s=1, a=50: you say 0, expected an integer"),
            (lambda n, s, a: math.sqrt(n * s / a), "you say 28.56"),
            (lambda n, s, a: max(range(1, n + 1), key=lambda k: s * n / k + a * k), "the least is"),
            (lambda n, s, a: min(range(1, n), key=lambda k: s * n / k + a * k), "n=12, s=16, a=1: 11 segments hold"),
            (lambda n, s, a: n, "the least is"),
            (lambda n, s, a: min(s * n / k + a * k for k in range(1, n + 1)), "n=9, s=1, a=1: 6.0 segments hold"),
            (lambda n, s, a: float("nan"), "you say nan")],
    ),
    page.third: Answers(
        right=[fit, fit_by_the_curve, fit_by_trying],
        wrong=[
            (lambda config, *rest: list(range(config.layers)), "your plan peaks at"),
            (lambda config, *rest: [(i,) for i in range(config.layers)], "your plan fits, and recomputes"),
            (fit_by_segments, "your plan fits, and recomputes"),
            (fit_first_blocks, "your plan"),
            (fit_last_blocks, "your plan"),
            (fit_without_moments, "your plan peaks at"),
            (partial(fit_with, free=1), "your plan peaks at"),
            (partial(fit_with, free=1.2), "are enough"),
            (partial(fit_with, part=slice(None)), "expected the blocks 0 to 5, each once and in order"),
            (partial(fit_with, part=slice(1, -1)), "expected the blocks 0 to 5, each once and in order"),
            (lambda config, batch, *rest: fit(config, 2, *rest), "4 blocks, 3 x 40 tokens"),
            (lambda config, *rest: [list(range(config.layers))], "a region is a tuple"),
            (lambda config, *rest: [float(i) for i in range(config.layers)], "expected the blocks 0 to 5"),
            (lambda config, *rest: tuple(fit(config, *rest)), "expected a list, you return"),
            (lambda config, batch, sequence, budget: optimal_schedule(
                **vars(gpt_costs(config, batch, sequence)), budget=budget / 1.01), "expected a list")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
