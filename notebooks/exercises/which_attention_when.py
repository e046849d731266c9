"""Exercises of the page *Which attention when*."""

import math

import torch

from refimpl.config import GPTConfig

from . import drawn, exercise

HINTS = {
    "first": [
        "A product of a token with a matrix takes 2 FLOPs for each number of the matrix.",
        "All heads of queries together are `config.heads * config.head_dim` features wide. Q Kᵀ takes 2 FLOPs for each "
        "pair and feature, and P V as many, whether or not heads share keys.",
        "Set 2 · numbers · T = 4 · (T² / 2) · width, and divide by T."],
    "second": [
        "`x = x.detach().requires_grad_()`, then `out = attend(x)`.",
        "`torch.autograd.grad(out[0, t].sum(), x, retain_graph=True)` returns a tuple of one gradient, (1, T, C). "
        "Which rows of it belong to later positions?",
        "The features of one output may cancel in their sum: multiply them by random numbers first."]}
CONFIGS = {
    "GPT-2 small": GPTConfig.named("gpt2"), "Llama 3 8B": GPTConfig.named("llama3-8b"),
    "heads of 256 features": GPTConfig(1000, 512, 2, 384, 4, head_dim=256),
    "12 heads that share 2 of keys": GPTConfig(1000, 512, 3, 768, 12, kv_heads=2)}
T, C = 24, 8


@exercise(f"{len(CONFIGS)} models", float)
def first(as_many_flops):
    """Grade `as_many_flops(config)`, which returns the length at which attention takes what a layer's matrices take."""
    for name, config in CONFIGS.items():
        numbers, said = sum(config.layer_parameters().values()), as_many_flops(config)
        if not (math.isfinite(said) and said > 0):
            return f"{name}: {said} is no length"
        pairs, matrices = 2 * said**2 * config.heads * config.head_dim, 2 * numbers * said
        if abs(pairs / matrices - 1) > 1e-6:
            return (f"{name}: at {said:,.1f} tokens half of the pairs take {pairs / 1e9:,.3f} GFLOP, and the matrices "
                    f"{matrices / 1e9:,.3f}")
    return None


def _softmax(seen_TT):
    """Return attention under a mask, which maps x (1, T, C)."""
    return lambda x: (x @ x.mT / C**0.5).masked_fill(~seen_TT, -math.inf).softmax(-1) @ x


def _mixtures(x):
    e = torch.randn(6, T, generator=torch.Generator().manual_seed(0))
    later = torch.arange(6) * T > torch.arange(T).unsqueeze(1) * 6
    return (x @ (e @ x).mT).masked_fill(later, -math.inf).softmax(-1) @ (e @ x)



def _differences(x):
    """The features of each output have the sum 0."""
    mixed = _softmax(torch.ones(T, T, dtype=torch.bool))(x)
    return mixed - mixed.mean(-1, keepdim=True)


def _cases():
    i, j = torch.arange(T).unsqueeze(1), torch.arange(T)
    causal, here = j <= i, i == j
    one = causal | (i == 5) & (j == 6)
    return {
        "a causal mask": (_softmax(causal), 0), "no token but itself": (_softmax(here), 0),
        "running sums": (lambda x: x.cumsum(1), 0), "no mask": (_softmax(causal | ~causal), T - 1),
        "a window of one token on each side": (_softmax((i - j).abs() <= 1), T - 1),
        "blocks of 8 that are seen whole": (_softmax(j // 8 <= i // 8), T - T // 8),
        "every eighth query sees one token more": (_softmax(causal | (i % 8 == 7) & (j == i + 1)), T // 8 - 1),
        "token 5 sees token 6": (_softmax(one), 1), "mixtures of all tokens under a triangle": (_mixtures, T - 1),
        "the mean of all tokens is taken off": (lambda x: x - x.mean(1, keepdim=True), T - 1),
        "features whose sum is 0": (_differences, T - 1),
        "all see the last token": (_softmax(causal | (j == T - 1)), T - 1)}


@exercise("twelve ways to attend", int)
def second(that_see_ahead):
    """Grade `that_see_ahead(attend, x)`, which counts the positions whose output depends on a later position of x."""
    x = drawn((1, T, C))[0]
    for name, (attend, right) in _cases().items():
        said = that_see_ahead(attend, x.clone())
        if said != right:
            return f"{name}: {said} of {T} positions are said to see ahead, and {right} do"
    return None
