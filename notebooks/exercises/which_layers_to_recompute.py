"""Exercises of the page *Which layers to recompute*."""

import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from refimpl import memory
from refimpl.checkpointing import PlannedBlocks, extra_flops, gpt_costs, optimal_schedule, time_peak_curve
from refimpl.model import GPT, GPTConfig

from . import exercise

CONFIG = GPTConfig(vocab_size=64, context_length=64, layers=6, hidden=32, heads=4, tied=False)


def _step(plan, config=CONFIG, sequence=64):
    """Return (gradients, peak in bytes, FLOPs beyond a plain step) of a GPT whose blocks run by `plan`."""
    torch.manual_seed(0)
    model, tokens = GPT(config), torch.randint(0, 64, (2, sequence))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plain = _flops(model, tokens)
    model.blocks = PlannedBlocks(model.blocks, plan)
    extra = _flops(model, tokens) - plain
    model.zero_grad(set_to_none=False)
    with memory.track(model, tokens) as t:  # outside the FLOP counter, which keeps tensors alive
        model(tokens, tokens).backward()
    return [p.grad for p in model.parameters()], t.peak.total - t.start.total, extra


def _flops(model, tokens):
    with FlopCounterMode(display=False) as counted:
        model(tokens, tokens).backward()
    return counted.get_total_flops()


@exercise("what is computed", [int])
def first(choose):
    """Grade `choose(layers, k)`, which returns the k layers whose recomputation, each as its own region, gives the
    smallest peak."""
    for k in (2, 4):
        said = sorted(choose(CONFIG.layers, k))
        if len(set(said)) != k or not set(said) <= set(range(CONFIG.layers)):
            return f"for k={k} you name {said}: expected {k} different layers below {CONFIG.layers}"
        best = [(i,) if i < k else i for i in range(CONFIG.layers)]
        expected, least, _ = _step(best)
        gradients, peak, _ = _step([(i,) if i in said else i for i in range(CONFIG.layers)])
        if not all(map(torch.equal, gradients, expected)):
            return "the gradients have changed"
        if peak > least:
            return f"recomputing {said} peaks at {peak:,} bytes; other {k} layers at {least:,}"
    return None


@exercise("what is computed", int)
def second(segments):
    """Grade `segments(n, s, a)`, which returns the number of segments k that minimizes s·n/k + a·k.

    The n functions are cut into k segments. Each function keeps s bytes, and its input takes a bytes.
    """
    for n, s, a in ((9, 1, 1), (100, 4, 1), (48, 34, 2), (12, 16, 1), (7, 0, 5)):
        def held(k, n=n, s=s, a=a):
            return s * n / k + a * k

        least, said = min(map(held, range(1, n + 1))), segments(n, s, a)
        if not isinstance(said, int) or not 1 <= said <= n:
            return f"n={n}, s={s}, a={a}: you say {said!r}, expected an integer from 1 to {n}"
        if not math.isclose(held(said), least):
            return f"n={n}, s={s}, a={a}: {said} segments hold {held(said):.1f} bytes, the least is {least:.1f}"
    return None


@exercise("what is computed")
def third(fit):
    """Grade `fit(config, batch, sequence, budget)`, which returns a plan for the blocks that recomputes the fewest
    FLOPs of all whose peak fits in `budget` bytes above parameters and gradients."""
    chain = gpt_costs(CONFIG, 2, 64)
    expected, whole, _ = _step(list(range(CONFIG.layers)))
    curve = [peak for peak, _ in time_peak_curve(**vars(chain))]
    for budget in (1.02 * whole, 1.02 * curve[-3], 1.02 * curve[2]):
        best = extra_flops(CONFIG, 2, 64, optimal_schedule(**vars(chain), budget=budget / 1.01).plan[:-1])
        gradients, peak, extra = _step(fit(CONFIG, 2, 64, budget))
        if not all(map(torch.equal, gradients, expected)):
            return "the gradients have changed"
        if peak > budget:
            return f"budget {budget:,.0f}: your plan peaks at {peak:,} bytes"
        if extra > best:
            return f"budget {budget:,.0f}: it fits, with {extra:,} FLOPs too many; {best:,} are enough"
    return None
