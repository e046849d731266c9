"""What a decoder of transformers computes before its layers, and after them: watched on a toy of it, not told by names.

    LlamaForCausalLM    model.embed_tokens      before       the first stage's
                        model.rotary_emb        no weights   every stage's: positions are each layer's
                        model.layers                         divided
                        model.norm, lm_head     after        the last stage's
"""

import itertools
from typing import NamedTuple

import torch
from torch import nn

from ..equivalence.fp64 import InFP64
from ..equivalence.loss_check import shifts
from ..equivalence.once_per_class import once
from .toys import tokens_of, toy_of


class Anatomy(NamedTuple):
    """`layers`: name of the list of layers. `first`, `last`, `all`: names of modules beside it, by the stages that need
    them. `returns`: how many things a layer returns in a tuple, x the first; 0 if it returns x. `after`: name of what
    is called first after the layers. `shifts`: whether the model scores a token on the one before it."""

    layers: str
    first: tuple
    last: tuple
    all: tuple
    returns: int
    after: str
    shifts: bool = True

    @property
    def base(self):
        """Return the name of the module that turns tokens into what the head reads."""
        return self.layers.partition(".")[0]

    def unknown(self, model):
        """List what a model has beside its layers, and others of its class have not."""
        return [name for name, _ in beside(model, self.layers) if name not in {*self.first, *self.last, *self.all}]


def anatomy_of(model):
    """Return the Anatomy of a decoder of transformers with a language model's head. TypeError for a model that has no
    such head, or no list of layers that are called one after the other; CannotShrink if no toy of it can be made."""
    if not hasattr(model, "get_output_embeddings"):
        return None
    return vars(model).get("anatomy") or once("anatomy", model, _anatomy)  # a stage has that of its model


def _anatomy(model):
    toy, _ = toy_of(model)
    calls = _calls(toy)
    layers = _list_of(toy, calls)
    inside = [calls[f"{layers}.{i}"] for i in range(len(toy.get_submodule(layers)))]
    begin, end = inside[0][0], inside[-1][1]
    found = {"first": [], "last": [], "all": []}
    for name, module in beside(toy, layers):
        first, last, _ = calls.get(name, (-1, -1, None))
        weights = any(True for _ in module.parameters()) or isinstance(module, nn.Dropout)
        found["first" if last < begin and weights else "last" if first > end else "all"].append(name)
    after = min((name for name in calls if calls[name][0] > end), key=lambda name: calls[name][0])
    return Anatomy(layers, *map(tuple, found.values()), max(kind for _, _, kind in inside), after, shifts(toy))


def _list_of(model, calls):
    """Return the name of the list of a model's layers: all are called, one after the other, and they are most of it."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 and "." in name:
            numbers = [calls.get(f"{name}.{i}") for i in range(len(module))]
            if None not in numbers and all(a[1] < b[0] for a, b in itertools.pairwise(numbers)):
                found.append((sum(p.numel() for p in module.parameters()), name))
    if not found or model.get_output_embeddings() is None:
        raise TypeError(f"the layers of {type(model).__name__} are not known: expected a decoder with a language "
                        "model's head, and a list of layers that are called one after the other")
    return max(found)[1]


def beside(model, layers):
    """Yield (name, module) of what is beside the list of layers, on each level from the model to it."""
    path = ["", *(layers.rsplit(".", n)[0] for n in range(layers.count("."), 0, -1)), layers]
    for outer, inner in zip(path[:-1], path[1:], strict=True):
        for name, module in model.get_submodule(outer).named_children():
            full = f"{outer}.{name}".lstrip(".")
            if full != inner:
                yield full, module


def _calls(model):
    """Return {name: (number of its first call, of its last one, length of the tuple it returned)} of a forward."""
    calls, names = {}, {module: name for name, module in model.named_modules()}

    def note(module, args, output):
        returns = len(output) if isinstance(output, tuple) else 0
        calls[names[module]] = calls.get(names[module], (order[0],))[0], order[0], returns
        order[0] += 1

    order = [0]
    handles = [module.register_forward_hook(note) for module in names]
    try:
        with InFP64(), torch.no_grad():
            model(input_ids=tokens_of(model), use_cache=False)  # watched: names of modules say nothing of the order
    finally:
        for handle in handles:
            handle.remove()
    return calls
