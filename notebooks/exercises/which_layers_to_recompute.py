"""Exercises of the page *Which layers to recompute*."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory
from refimpl.checkpointing import PlannedBlocks, extra_flops, gpt_costs, optimal_schedule, time_peak_curve
from refimpl.checkpointing.chain import stages_of
from refimpl.model import GPT, GPTConfig

from . import exercise

HINTS = {
    "first": [
        "Look at the moment when backward begins: everything that was kept is there. Which region is recomputed then?",
        "A region that is recomputed late in backward finds little of the others. Backward runs from the last layer to "
        "the first.",
        "The first k layers are one of the best choices. Return their list."],
    "second": [
        "Differentiate by k: the sum is least where s·n/k² = a. That k is hardly ever an integer.",
        "The best integer is one of the two beside the root. Compare their sums. It is at least 1, and at most n.",
        "n is small. `min(range(1, n + 1), key=...)` with the sum as the key does it without a root."],
    "third": [
        "`gpt_costs(config, batch, sequence)` has what `optimal_schedule` takes: `optimal_schedule(**vars(chain), "
        "budget=...)`.",
        "Ask for a budget that is smaller by 1 %, and return the schedule's `.plan`.",
        "The plan's last stage is the head, which is not a block: leave it out by `[:-1]`."]}


def _config(layers, hidden=32):
    return GPTConfig(vocab_size=64, context_length=64, layers=layers, hidden=hidden, heads=4, tied=False)


def _model(config, batch, sequence):
    """Return a model with gradients, and tokens."""
    torch.manual_seed(0)
    model, tokens = GPT(config), torch.randint(0, 64, (batch, sequence))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, tokens


def _peak(plan, config, batch=2, sequence=64):
    """Return the peak of a step in bytes, above parameters and gradients. The blocks run by `plan`."""
    model, tokens = _model(config, batch, sequence)
    model.blocks = PlannedBlocks(model.blocks, plan)
    with memory.track(model, tokens) as t:
        model(tokens, tokens).backward()
    return t.peak.total - t.start.total


def _flops(plan, config, batch, sequence):
    """Count the FLOPs of a step. (Not while it is tracked: the counter keeps tensors alive.)"""
    model, tokens = _model(config, batch, sequence)
    model.blocks = PlannedBlocks(model.blocks, plan)
    with FlopCounterMode(display=False) as counted:
        model(tokens, tokens).backward()
    return counted.get_total_flops()


@exercise("the peak", [int])
def first(choose):
    """Grade `choose(layers, k)`, which returns a list of the k layers whose recomputation, each as its own region,
    gives the smallest peak."""
    for layers, k in ((6, 2), (6, 4), (5, 1), (4, 3)):
        said = sorted(choose(layers, k))
        if len(set(said)) != k or len(said) != k or not set(said) <= set(range(layers)):
            return f"{layers} layers, k={k}: you name {said}, expected {k} different layers from 0 to {layers - 1}"
        peak, least = (_peak([(i,) if i in chosen else i for i in range(layers)], _config(layers))
                       for chosen in (said, range(k)))
        if peak > least:
            return f"{layers} layers, k={k}: recomputing {said} peaks at {peak:,} bytes, {k} others at {least:,}"
    return None


@exercise("the bytes of your segments", int)
def second(segments):
    """Grade `segments(n, s, a)`, which returns the number of segments k that minimizes s·n/k + a·k.

    The n functions are cut into k segments. Each function keeps s bytes, and its input takes a bytes.
    """
    for n, s, a in ((9, 1, 1), (100, 4, 1), (48, 34, 2), (12, 16, 1), (7, 1, 50), (17, 1, 8), (30, 3, 7), (26, 1, 1)):
        said, held = segments(n, s, a), {k: s * n / k + a * k for k in range(1, n + 1)}
        if said not in held:
            return f"n={n}, s={s}, a={a}: you say {said!r}, expected an integer from 1 to {n}"
        if held[said] > min(held.values()):
            return (f"n={n}, s={s}, a={a}: {said} segments hold {held[said]:.2f} bytes, the least is "
                    f"{min(held.values()):.2f}")
    return None


@exercise("the plan's peak and FLOPs", list)
def third(fit):
    """Grade `fit(config, batch, sequence, budget)`, which returns a plan for the blocks that recomputes the fewest
    FLOPs of all whose peak fits in `budget` bytes above parameters and gradients. 1 % of the budget is left free."""
    for shape in ((_config(6), 2, 64), (_config(4, 48), 3, 40)):
        layers, chain = shape[0].layers, vars(gpt_costs(*shape))
        plain, peaks = _flops(range(layers), *shape), [peak for peak, _ in time_peak_curve(**chain)]
        for budget in (2 * peaks[-1], int(1.02 * peaks[-3]), peaks[-2], int(1.02 * peaks[2]), int(1.02 * peaks[0])):
            plan, about = fit(*shape, budget), f"{layers} blocks, {shape[1]} x {shape[2]} tokens, budget {budget:,}: "
            stages = list(stages_of(plan))
            if stages != list(range(layers)) or not all(isinstance(stage, int) for stage in stages):
                return about + (f"your plan is {str(plan)[:80]}, expected the blocks 0 to {layers - 1}, each once and "
                                "in order; a region is a tuple")
            peak = _peak(plan, *shape)
            if peak > budget:
                return about + f"your plan peaks at {peak:,} bytes"
            extra = _flops(plan, *shape) - plain
            best = extra_flops(*shape, optimal_schedule(**chain, budget=budget / 1.01).plan[:-1])
            if extra > best:
                return about + f"your plan fits, and recomputes {extra:,} FLOPs; {best:,} are enough"
    return None
