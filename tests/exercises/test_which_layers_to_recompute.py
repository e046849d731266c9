"""Right answers pass, wrong and unanswered ones do not."""

import math

from exercises_kit import Answers, graded

from exercises import which_layers_to_recompute as page
from refimpl.checkpointing import gpt_costs, optimal_schedule


def segments(n, s, a):
    root = math.sqrt(n * s / a)
    return min((min(n, max(1, k)) for k in (math.floor(root), math.ceil(root))), key=lambda k: s * n / k + a * k)


def fit(config, batch, sequence, budget):
    chain = gpt_costs(config, batch, sequence)
    return optimal_schedule(**vars(chain), budget=budget / 1.01).plan[:-1]


ANSWERS = {
    page.first: Answers(
        right=[lambda layers, k: range(k)],
        wrong=[
            (lambda layers, k: range(layers - k, layers), "other 2 layers at"),
            (lambda layers, k: range(layers), "expected 2 different layers")],
    ),
    page.second: Answers(
        right=[segments],
        wrong=[
            (lambda n, s, a: math.isqrt(n), "the least is"),
            (lambda n, s, a: n + 1, "expected an integer from 1 to")],
    ),
    page.third: Answers(
        right=[fit],
        wrong=[
            (lambda config, *rest: list(range(config.layers)), "your plan peaks at"),
            (lambda config, *rest: [(i,) for i in range(config.layers)], "are enough")],
    ),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)
