"""A model that is cut over ranks is held to the whole, once for each class: a toy of it, on simulated ranks."""

import copy
import re
import warnings
from typing import NamedTuple

import torch

from ..comm import simulate
from ..others import ask
from ..sharding import spec_of
from .comparison import CannotShrink, Computed, CutDiffers, computed, difference
from .once_per_class import once


class Proven(NamedTuple):
    """`ranks`: on how many a toy was cut. `summed`: {name of a module, `*` for a layer's number} of weights that each
    rank uses on its own part, and whose gradients have to be summed besides those of the plan."""

    ranks: tuple
    summed: tuple = ()


def prove(model, question, cut, *, run=None, strict=True, **toy):
    """Prove that a model of transformers, cut by `cut(toy, comm, summed)`, computes what it does whole: its output, its
    loss and every gradient. Returns Proven. `run(toy, comm, tokens)`: what a rank computes, as Computed, if it is not
    given all tokens. `toy`: options of the question for a toy.

    CutDiffers if it does not. If no toy can be made: CannotShrink, or unless `strict` a warning and None. A warning,
    too, for a model that somebody has changed since its class made it.
    """
    try:
        found = once(question, model, lambda model: _prove(model, cut, run or _all_tokens, toy))
    except CannotShrink as error:
        if strict:
            raise
        warnings.warn(f"{type(model).__name__} is cut, and it was not checked against the whole: {error}", stacklevel=4)
        return None
    if changed := ask("changes", model):
        warnings.warn(f"{type(model).__name__} is cut, and what was checked against the whole is its class: {changed}",
                      stacklevel=4)
    return found


def _prove(model, cut, run, options):
    with torch.enable_grad():
        toy, ranks, tokens, whole = whole_of(model, **options)
        summed, tried = (), (3,) if ranks == 3 else (2, 4)
        for n in tried:
            differs, more = _compared(model, toy, n, whole, tokens, cut, run, summed)
            if differs and more:
                summed = more
                differs, _ = _compared(model, toy, n, whole, tokens, cut, run, summed)
            if differs:
                raise CutDiffers(f"{type(model).__name__}, cut over {n} ranks, would not compute what it does whole: "
                                 f"{differs}, found on {ask('size', toy)}")
    return Proven(tried, summed)


def whole_of(model, **options):
    """Return (a toy, on how many ranks it can be cut, tokens, what it Computed of them). CannotShrink if that fails."""
    toy, ranks = ask("toy", model, **options)
    tokens = ask("tokens", toy)
    try:
        whole = copy.deepcopy(toy)  # which may keep what it has seen, as rotary tables that grow
        return toy, ranks, tokens, computed(whole, lambda: ask("results", whole, tokens))
    except Exception as error:
        raise CannotShrink(f"a toy of {type(model).__name__} cannot be trained: {first_line_of(error)}") from error


def first_line_of(error):
    """Return an error's class and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def weights_of(output, length):
    """Return numbers by which a loss weighs an output (B, T, C) of the whole sequence, of `length` tokens."""
    return torch.randn(len(output), length, output.shape[-1], generator=torch.Generator().manual_seed(2),
                       dtype=torch.float64)


def _compared(model, toy, n, whole, tokens, cut, run, summed):
    """Return (what differs, or None; modules whose gradients are right when they are summed over ranks)."""
    try:
        found = simulate(_on_rank, n, toy, tokens, lambda toy, comm: cut(toy, comm, summed), run)
    except Exception as error:
        if isinstance(error.__cause__, CannotShrink):
            raise error.__cause__ from error
        raise CutDiffers(f"{type(model).__name__} cannot be cut over {n} ranks: "
                         f"{first_line_of(error.__cause__ or error)}") from error
    parts = [lambda name, gradients, specs=specs: _part(specs[name], gradients) for _, specs in found]
    differ = [difference(whole, cut, part) for (cut, _), part in zip(found, parts, strict=True)]
    if not any(differ):
        return None, ()
    together = _summed([cut.gradients for cut, _ in found])
    owners = set()
    for (one, specs), part in zip(found, parts, strict=True):
        for name in specs:
            if name in together and specs[name].lengths == specs[name].shape and difference(
                    whole, Computed({}, {}, {name: one.gradients[name]}), part) and not difference(
                    whole, Computed({}, {}, {name: together[name]}), part):
                owners.add(re.sub(r"(?<=\.)\d+(?=\.)", "*", name.rpartition(".")[0]))
    return next(filter(None, differ)), tuple(sorted(owners))


def _all_tokens(toy, comm, tokens):
    found = computed(toy, lambda: ask("results", toy, tokens))
    if found.results.get("logits") is not None and found.results["logits"].shape[-1] != toy.config.vocab_size:
        del found.results["logits"]  # this rank's columns: the loss has been computed of all ranks'
    return found


def _on_rank(comm, toy, tokens, cut, run):
    toy = cut(toy, comm)
    found = run(toy, comm, tokens)
    return found, {name: spec_of(name, p) for name, p in toy.named_parameters(remove_duplicate=False)}


def _part(spec, gradients):
    gradient = gradients[spec.name]
    return None if gradient is None else spec.block(gradient)


def _summed(ranks):
    """Return {name: sum over ranks} of gradients that are as large on all of them."""
    found = {}
    for name in ranks[0]:
        every = [each.get(name) for each in ranks]
        if all(x is not None and x.shape == every[0].shape for x in every):
            found[name] = sum(every)
    return found
