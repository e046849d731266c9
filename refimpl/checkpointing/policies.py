"""Which parts of a model to recompute, chosen from outside: no class changes, no key of `state_dict` changes.

A policy gives chosen modules a `forward` of their own that is the old one under `checkpoint`. It is a context, and can
be removed at any time. The bytes of each policy are in `closed_forms.py`.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from torch import nn

from ..common.keyword_options import check_options
from ..others import ask
from .region import OPTIONS, checkpoint, checkpointed

PARTS = ("block", "attention", "attention core", "mlp")


class Recomputing:
    """Holds the changes of a policy. `.modules` are the recomputed ones. Use it as a context, or call `remove()`.

    Raises ValueError for a module that is recomputed already, since doing it twice costs time and saves nothing.
    """

    def __init__(self) -> None:
        self.modules = []
        self._undo = []

    def add(self, module: nn.Module, how: Callable[..., Any] = checkpoint, **options: Any) -> Any:
        """Recompute the whole of `module`: its forward becomes `how(forward, *args, **kwargs)`.

        The `options` are those of `checkpoint`; TypeError for any other, and for all beside another `how`.
        """
        check_options(options, OPTIONS if how is checkpoint else (), type(self).__name__)
        if not isinstance(module, nn.Module):
            raise TypeError(f"cannot recompute a {type(module).__name__}: expected modules, e.g. model.blocks")
        if isinstance(vars(module).get("forward"), _Forward):
            raise ValueError(f"this {type(module).__name__} is recomputed already: remove() the other policy first")
        previous = vars(module).get("forward")  # set by another technique
        module.forward = _Forward(module, previous, how, options)  # on the instance: other modules of the class stay
        self._undo.append(partial(_restore, module, "forward", previous))
        self.modules.append(module)

    def add_function(self, owner: nn.Module, name: str, **options: Any) -> Any:
        """Recompute a plain function that is an attribute of the module `owner`. The `options` are `checkpoint`'s."""
        check_options(options, OPTIONS, type(self).__name__)
        function = getattr(owner, name)
        if isinstance(function, nn.Module):
            return self.add(function, **options)
        if isinstance(function, partial) and function.func is checkpoint:
            raise ValueError(f"{name} of this {type(owner).__name__} is recomputed already: remove() the other policy")
        # a plain function has no module whose forward could change
        setattr(owner, name, partial(checkpoint, function, **options))
        self._undo.append(partial(setattr, owner, name, function))
        self.modules.append(owner)

    def remove(self) -> None:
        """Put the model back as it was."""
        while self._undo:
            self._undo.pop()()  # the last change first: each holds what was there before it
        self.modules.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.remove()

    def __len__(self) -> int:
        return len(self.modules)


def _restore(module, name, previous):
    if previous is None:
        delattr(module, name)
    else:
        setattr(module, name, previous)


class _Forward:
    """The `forward` of one recomputed module. It refers to the module weakly, or no model would be freed when its last
    name goes; and a copy of the module gets a copy of this that refers to the copy."""

    def __init__(self, module, previous, how, options):
        self._module, self._previous, self._how, self._options = weakref.ref(module), previous, how, options

    def __call__(self, *args, **kwargs):
        module = self._module()
        # looked up now: a bound method would hold the module
        forward = self._previous or partial(type(module).forward, module)
        if self._how is checkpoint:
            return checkpointed(forward, args, kwargs, **self._options)  # the call's keywords are the module's own
        return self._how(forward, *args, **kwargs)

    def __deepcopy__(self, memo):
        module = self._module()
        return _Forward(memo.get(id(module), module), self._previous, self._how, self._options)

    def __reduce__(self):
        return _Forward, (self._module(), self._previous, self._how, self._options)


def recompute(modules: Iterable[nn.Module], **options: Any) -> Recomputing:
    """Recompute each of `modules` (an iterable) as a region of its own. Returns a Recomputing.

    `with recompute(model.blocks): loss = model(x)`: only the forward must be inside. The `options` are those of
    `checkpoint`; TypeError for any other.
    """
    check_options(options, OPTIONS, "recompute")
    applied = Recomputing()
    try:
        for module in modules:
            applied.add(module, **options)
    except BaseException:
        applied.remove()
        raise
    return applied


def every(layers, start_layer=0, end_layer=None, interval=1):
    """Return the indexes start_layer, start_layer + interval, … below end_layer (default: `layers`).

    ValueError for an interval below 1 and for ends that are not within 0 … `layers`, in order.
    """
    end_layer = layers if end_layer is None else end_layer
    if not _is_int(interval) or interval < 1:
        raise ValueError(f"interval={interval!r}: expected an integer of at least 1; 2 recomputes every second block")
    if not _is_int(start_layer) or not _is_int(end_layer) or not 0 <= start_layer <= end_layer <= layers:
        raise ValueError(f"start_layer={start_layer!r}, end_layer={end_layer!r}: expected 0 ≤ start_layer ≤ end_layer "
                         f"≤ {layers}, the number of blocks")
    return list(range(start_layer, end_layer, interval))


def spread(layers, ratio):
    """Return the indexes of round(ratio · layers) blocks, evenly spread. ValueError unless 0 ≤ ratio ≤ 1."""
    if not 0 <= ratio <= 1:  # NaN is neither
        raise ValueError(f"ratio={ratio!r}: expected a share of the blocks, from 0 to 1")
    n = round(ratio * layers)
    # where the count of chosen blocks steps up
    return [i for i in range(layers) if (i + 1) * n // layers > i * n // layers]


def _is_int(value):
    return isinstance(value, int) and not isinstance(value, bool)


def return_on_time(saved: float, slower: float, noise: float = 0.01) -> float:
    """Return what a policy saves for its time: share of the peak saved ÷ share of the time added.

    `saved` and `slower` are shares of the step without the policy: 0.4 and 0.25 return 1.6. A slow-down within `noise`
    cannot be measured: the return is then infinite if something is saved, and 0 if nothing is.
    """
    if saved <= 0:
        return 0.0
    return saved / slower if slower > noise else math.inf


class DynamicCheckpoint(Recomputing):
    """Recompute every `interval`-th of `blocks` in a range, or a `ratio` of them; the choice may change between steps.

    `DynamicCheckpoint(model.blocks, start_layer=0, end_layer=24, interval=2)` recomputes blocks 0, 2, …, 22. `.chosen`
    are the indexes; `.change(ratio=0.5)` chooses anew.

    - `start_layer`, `end_layer`: the first block of the range and the first one after it; by default all blocks.
    - `interval`: the distance from one recomputed block to the next; by default 1, every block.
    - `ratio`: instead of the three, the share of blocks to recompute, evenly spread.
    - `options`: those of `checkpoint`.

    Raises ValueError for a value out of range and for a ratio beside any of the three; TypeError for an unknown option.
    """

    def __init__(self, blocks: Sequence[nn.Module], start_layer: int | None = None, end_layer: int | None = None,
                 interval: int | None = None, ratio: float | None = None, **options: Any) -> None:
        super().__init__()
        check_options(options, ("start_layer", "end_layer", "interval", "ratio", *OPTIONS), type(self).__name__)
        self._blocks, self._options = list(blocks), options
        self.change(start_layer, end_layer, interval, ratio)

    def change(self, start_layer: int | None = None, end_layer: int | None = None, interval: int | None = None,
               ratio: float | None = None) -> None:
        """Choose other blocks from the next forward on."""
        layers, given = len(self._blocks), {"start_layer": start_layer, "end_layer": end_layer, "interval": interval}
        given = {name: value for name, value in given.items() if value is not None}
        if ratio is not None and given:
            given = ", ".join(f"{name}={value!r}" for name, value in given.items())
            raise ValueError(f"ratio={ratio!r} beside {given}: expected one or the other")
        # before remove(): a wrong value changes nothing
        chosen = every(layers, **given) if ratio is None else spread(layers, ratio)
        self.remove()
        for i in chosen:
            self.add(self._blocks[i], **self._options)
        self.chosen = chosen

    @property
    def plan(self) -> list[Any]:
        """Return the choice as a plan, for the closed forms: `[(0,), 1, (2,), 3]`."""
        return [(i,) if i in self.chosen else i for i in range(len(self._blocks))]


def selective(blocks: Sequence[nn.Module], part: str = "attention core", **options: Any) -> Recomputing:
    """Recompute one part of each block: the `attention core` (its function of q, k, v), the whole `attention` or the
    `mlp`; `block` is all of it. Returns a Recomputing.

    Blocks are modules with `.attention` (a module, its function as `.attention.attention`) and `.mlp`, as those of
    `refimpl.model`. In all others the `attention` is the modules that compute it, with their projections, whatever
    their names (`known_models/attention_layers`). ValueError for an unknown part or blocks without it. The `options`
    are those of `checkpoint`; TypeError for any other.

    The core is where scores of s × s are made: it is most of the bytes of a long sequence and few of the operations
    ("Reducing Activation Recomputation in Large Transformer Models", Korthikanti et al. 2022, section 5).
    """
    if part not in PARTS:
        raise ValueError(f"part={part!r}: expected one of {', '.join(map(repr, PARTS))}")
    check_options(options, OPTIONS, "selective")
    applied = Recomputing()
    try:
        for block in blocks:
            if part == "block":
                applied.add(block, **options)
                continue
            owner = getattr(block, "mlp" if part == "mlp" else "attention", None)
            owners = [] if owner is None else [owner]
            if part != "mlp" and not callable(getattr(owner, "attention", None)):  # not a block as our GPT's
                owners = ask("attentions", block) if part == "attention" else []
            if not owners:
                raise ValueError(f"a {type(block).__name__} has no {part}: expected .attention, .attention.attention "
                                 "and .mlp, or for 'attention' modules inside whose forward calls "
                                 "scaled_dot_product_attention or the like; use recompute(modules) for other models")
            for each in owners:
                if part == "attention core":
                    applied.add_function(each, "attention", **options)
                else:
                    applied.add(each, **options)
    except BaseException:
        applied.remove()
        raise
    return applied
