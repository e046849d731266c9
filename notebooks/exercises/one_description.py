"""Exercises of the page *One description*."""

import math

from refimpl.engine import Recipe

from . import exercise

HINTS = {
    "first": [
        "Of each parameter there are the weight, and what AdamW keeps: two moments in fp32. With weights in bf16 there "
        "is a third number in fp32, the master.",
        "ZeRO 1 and 2 cut what AdamW keeps, and the master, over `recipe.dp` ranks; ZeRO 3 cuts the weights, too.",
        "ZeRO 3 makes weights in bf16 of the masters when it gathers them: between steps it has masters alone.",
        "Stage 0 cuts nothing, whatever `recipe.dp` is."],
    "second": [
        "If n blocks are enough, all larger n are enough, too: ask for the middle, and go on in one half.",
        "Keep two numbers, one that is too few and one that is enough. Stop when they are neighbours.",
        "Ask for `peak(layers)` first: if that is more than the budget, nothing is enough. None of your guesses has to "
        "be asked twice."]}
P = 1_000_000
RECIPES = (
    Recipe(), Recipe(precision="bf16"), Recipe(dp=4), Recipe(dp=4, zero=0), Recipe(dp=4, zero=2, precision="bf16"),
    Recipe(dp=8, zero=3), Recipe(dp=8, zero=3, precision="bf16"), Recipe(dp=2, precision="autocast"),
    Recipe(zero=3), Recipe(dp=10, zero=1, precision="bf16"))


def rest(parameters, recipe):
    """Return the bytes of weights and AdamW's states of a rank between steps, without padding and counters."""
    low, ranks = recipe.precision == "bf16", recipe.dp if recipe.zero else 1
    weights, states = parameters * (2 if low else 4), parameters * (12 if low else 8)
    if recipe.zero == 3:
        weights = 0 if low else weights / ranks  # weights in bf16 are made of the masters when they are gathered
    return weights + states / ranks


@exercise(f"{len(RECIPES)} recipes", float)
def first(at_rest):
    """Grade `at_rest(parameters, recipe)`: the bytes of weights and AdamW's states that a rank has between steps."""
    for recipe in RECIPES:
        said, right = at_rest(P, recipe), rest(P, recipe)
        if not math.isclose(said, right, rel_tol=1e-6):
            return f"{recipe}: of a million parameters you say {said:,.0f} bytes, a rank has {right:,.0f}"
    return None


def _peaks(layers, first, block):
    """Return a function that says the peak with n of `layers` blocks recomputed, and a list of what it was asked."""
    asked = []

    def peak(n):
        if type(n) is not int or not 0 <= n <= layers:
            raise ValueError(f"peak({n!r}): expected a whole number from 0 to {layers}")
        asked.append(n)
        return first - n * block

    return peak, asked


@exercise("a budget, and how often it asks", int)
def second(fewest):
    """Grade `fewest(layers, budget, peak)`: the least n of 0 … layers with peak(n) ≤ budget, -1 if there is none. It
    may ask for peak as often as halving takes, and twice more."""
    for layers, right in ((8, 3), (8, 0), (8, 8), (8, -1), (96, 50), (96, 1), (1, 1), (1, 0), (126, 125), (5, -1)):
        budget = 1000 * layers - 7 * right if right >= 0 else 1000 * layers - 7 * layers - 1
        peak, asked = _peaks(layers, 1000 * layers, 7)
        said, most = fewest(layers, budget, peak), math.ceil(math.log2(layers + 1)) + 2
        if said != right:
            what = "no number is enough" if right < 0 else f"{right} are enough, and {right - 1} are not"
            return f"{layers} blocks, a budget of {budget:,} bytes: you say {said}, and {what}"
        if len(asked) > most:
            return (f"{layers} blocks: right, but asked {len(asked)} times; halving takes at most {most}, and each "
                    "question is a dry run")
    return None
