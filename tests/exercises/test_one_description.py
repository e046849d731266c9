"""Right answers pass, wrong and unanswered ones do not; and the closed form is what ranks hold."""

from bisect import bisect_left
from functools import partial

import pytest
from exercises_kit import Answers, graded

from exercises import one_description as page
from refimpl.engine.building import dry_recipe
from refimpl.model import GPT, GPTConfig


def at_rest(parameters, recipe):
    numbers = {"fp32": (4, 8), "autocast": (4, 8), "bf16": (2, 12)}[recipe.precision]
    weights, states = (parameters * each for each in numbers)
    if recipe.zero >= 1:
        states /= recipe.dp
    if recipe.zero == 3:
        weights = 0 if recipe.precision == "bf16" else weights / recipe.dp
    return weights + states


def by_stage(parameters, recipe):
    w, s = (2, 12) if recipe.precision == "bf16" else (4, 8)
    at_3 = s if w == 2 else w + s
    return parameters * [w + s, w + s / recipe.dp, w + s / recipe.dp, at_3 / recipe.dp][recipe.zero]


def by_numbers(parameters, recipe):
    """Each number of a parameter by itself: weight, master, two moments."""
    low, cut = recipe.precision == "bf16", 1 / recipe.dp if recipe.zero else 1
    numbers = [4 * cut] * (3 if low else 2)
    numbers += {True: [2] * (recipe.zero < 3), False: [4 * (cut if recipe.zero == 3 else 1)]}[low]
    return sum(numbers) * parameters


def fewest(layers, budget, peak):
    if peak(layers) > budget:
        return -1
    few, enough = -1, layers
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if peak(middle) <= budget else (middle, enough)
    return enough


def by_bisect(layers, budget, peak):
    found = bisect_left(range(layers + 1), True, key=lambda n: peak(n) <= budget)
    return found if found <= layers else -1


def by_line(layers, budget, peak):
    """A peak that falls by the same with each block says all with two questions."""
    none, one = peak(0), peak(1)
    n = max(0, -((budget - none) // (none - one)))
    return n if n <= layers else -1


def one_by_one(layers, budget, peak):
    return next((n for n in range(layers + 1) if peak(n) <= budget), -1)


ANSWERS = {
    page.first: Answers(
        right=[at_rest, by_stage, by_numbers],
        wrong=[
            (lambda parameters, recipe: 16.0 * parameters / recipe.dp, "Recipe(): of a million parameters you say"),
            (lambda parameters, recipe: at_rest(parameters, recipe.replace(dp=1)), "Recipe(dp=4): of a million"),
            (lambda parameters, recipe: at_rest(parameters, recipe) / (recipe.dp if not recipe.zero else 1),
             "Recipe(zero=0, dp=4)"),
            (lambda parameters, recipe: at_rest(parameters, recipe) + 4 * parameters, "a rank has 12,000,000"),
            (lambda parameters, recipe: at_rest(parameters, recipe.replace(zero=min(recipe.zero, 2))),
             "Recipe(zero=3, dp=8)"),
            (lambda parameters, recipe: at_rest(parameters, recipe.replace(precision="fp32")) - (
                2 * parameters if recipe.precision == "bf16" else 0), "Recipe(precision='bf16'")]),
    page.second: Answers(
        right=[fewest, by_bisect, by_line],
        wrong=[
            (one_by_one, "8 blocks: right, but asked 9 times"), (lambda layers, budget, peak: layers, "a budget of"),
            (lambda layers, budget, peak: fewest(layers, budget - 1, peak), "8 blocks, a budget of"),
            (lambda layers, budget, peak: fewest(layers, budget + 7, peak), "you say 2, and 3 are enough"),
            (lambda layers, budget, peak: max(0, fewest(layers, budget, peak)), "no number is enough"),
            (lambda layers, budget, peak: fewest(layers - 1, budget, peak) if layers > 1 else 0, "8 blocks")]),
}
test_right_answers, test_wrong_answers, test_answers_of_no_use, test_another_dtype = graded(page, ANSWERS)


@pytest.mark.parametrize("recipe", page.RECIPES[:7], ids=repr)
def test_the_closed_form_is_what_a_rank_has(recipe):
    make = partial(GPT, GPTConfig(256, 32, layers=4, hidden=64, heads=4))
    found = dry_recipe(recipe, make, 2, rank=0)
    last, count = found.phases["step"], found.trace.result.parameters
    assert last["parameters"] + last["optimizer state"] == pytest.approx(page.rest(count, recipe), rel=0.02)
